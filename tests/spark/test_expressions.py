"""Expressions against Spark's batch engine: equal values and types for random rows, and the same errors.

Each text is computed for rows with nulls, extremes and odd text by both. A text whose values raise is in ``RAISING``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from expression_rows import as_dataframe, comparable, differences, rows

from flux.errors import SchemaError, UsageError
from flux.expressions.steps import Select, Where
from spark_integration.expressions.analysed_operators import steps_of

pytestmark = pytest.mark.spark
F = pytest.importorskip("pyspark.sql.functions")

LOGIC = """i <=> j|i = j|i < j|f = g|f < g|f >= g|f <=> g|r < f|b and c|b or c|not b|s = u|s < u|d = e|d < e|ts = ts2|ts < ts2
dt < dt2|bi = bi|b < c|f is null|isnan(f)|i in (1,2,3)|i in (1,2,null)|f in (0D, double('nan'))|s in ('a','abc',u)
i between 0 and 10|f between g and 1000|s between 'a' and 'b'|i in (j, k)|if(i>0, i, j)
case when i>0 then 'p' when i<0 then 'n' end|case k when 1 then 'one' when 2 then 'two' else 'x' end|coalesce(i,j,0)
nullif(i,1)|nvl(s,u)|nvl2(s,u,'z')|ifnull(f,g)|nanvl(f,g)|greatest(i,j)|least(i,j,k)|greatest(f,g)|least(f,g)
greatest(s,u)|least(ts,ts2)|greatest(d,e)|greatest(b,c)|b and null|b or null|nullif(1,i)"""
NUMBERS = """if(k<>0, i div k, null)|case when k <> 0 then l % k end|if(k=0,null,pmod(l,k))|if(k=0,0,i%k)|if(g=0,0,f/g)
if(g=0,0,f%g)|if(g=0,0,pmod(f,g))|f+g|f-g|f*g|-f|abs(f)|r*2|try_add(i,j)|try_subtract(l,m)|try_multiply(l,m)
try_divide(i,j)|try_add(l,m)|try_multiply(i,j)|try_divide(f,g)|try_mod(l,m)|try_subtract(by,by)|by+0Y|i & j|i | j|i ^ j|~i
d+e|d-e|d*d|if(d=0,0,e/d)|if(d=0,0,d%d)|if(e=0,0,d%e)|if(d=0,0,e div d)|-d|abs(d)|d*e|try_add(w,w)|try_multiply(w,e)
try_divide(w,d)|try_divide(d,w)|try_divide(w,w)|d*2|d+1|d*1.5|try_multiply(w,w)|try_subtract(w,e)|d/3|e/7|e div 3|d % 7
try_mod(w,e)|round(d,1)|round(d)|round(d,-1)|round(e,3)|round(f,2)|round(f)|round(g,1)|round(f,-2)|bround(f,1)|bround(d,1)
round(r,1)|round(k)|floor(d)|ceil(d)|floor(l)|floor(e,2)|ceil(e,2)|sqrt(f)|sign(f)|floor(i)|pow(n,2)|pow(g,0.5)|pow(f,g)|pow(g,n)|exp(g)
ln(f)|log10(f)|log2(g)
floor(if(abs(f)<1e18,f,0))|ceil(if(abs(g)<1e18,g,0))|interval 1 minute * k"""
CASTS = """cast(i as bigint)|cast(i as double)|cast(i as string)|cast(l as string)|cast(i as decimal(12,2))|cast(b as int)
cast(b as string)|cast(i as boolean)|cast(f as boolean)|cast(d as double)|cast(e as double)|cast(w as double)
cast(d as string)|cast(e as string)|cast(w as string)|cast(d as float)|cast(d as decimal(12,3))|cast(g as float)
cast(r as double)|cast(l as double)|cast(l as float)|cast(s as binary)|cast(dt as string)|cast(ts as string)
cast(nt as string)|cast(ts as date)|cast(dt as timestamp)|cast(nt as timestamp)|cast(ts as timestamp_ntz)
cast(ts as bigint)|cast(ts as double)|cast(ts as decimal(20,6))|cast(b as double)|cast(b as decimal(3,1))
cast(i as timestamp)|cast(dt as timestamp_ntz)|cast(e as boolean)|cast(i as float)|try_cast(i as tinyint)
try_cast(l as int)|try_cast(f as int)|try_cast(f as bigint)|try_cast(f as smallint)|try_cast(f as decimal(10,3))
try_cast(g as decimal(4,1))|try_cast(w as int)|try_cast(w as bigint)|try_cast(e as decimal(10,2))
try_cast(w as decimal(20,2))|try_cast(l as decimal(10,0))|try_cast(num as int)|try_cast(num as bigint)
try_cast(num as tinyint)|try_cast(num as double)|try_cast(num as float)|try_cast(num as decimal(10,2))
try_cast(num as decimal(38,0))|try_cast(num as decimal(38,18))|try_cast(num as boolean)|try_cast(tim as date)
try_cast(tim as timestamp)|try_cast(tim as timestamp_ntz)|try_cast(f as timestamp)|try_cast(ts as int)
try_cast(l as timestamp)|try_cast(r as decimal(10,4))|cast(e as timestamp)|cast(g as string)|try_cast(s as int)"""
TEXT = r"""upper(s)|lower(s)|trim(s)|ltrim(s)|rtrim(s)|trim(both 'a ' from s)|length(s)|char_length(s)|length(bi)
octet_length(s)|substring(s,1,2)|substring(s,0,2)|substring(s,-3,2)|substring(s,-2)|substring(s,k,n)|substring(s,k)
substr(s,2)|left(s,2)|right(s,2)|left(s,k)|right(s,k)|concat(s,u)|concat(s,'-',u,i)|concat_ws('-',s,u)|concat_ws(s,u,'x')
concat(bi,bi)|replace(s,'a','XY')|replace(s,'','x')|replace(s,'a')|instr(s,'b')|instr(s,'')|locate('a',s)|locate('a',s,3)
position('b' in s)|startswith(s,'a')|startswith(s,u)|endswith(s,'b')|endswith(s,u)|contains(s,'b')|reverse(s)|repeat(s,2)
repeat(s,k)|lpad(s,5,'x')|rpad(s,5,'éa')|lpad(s,3)|split_part(s,'/',2)|split_part(s,'/',-1)|substring_index(s,'/',2)
substring_index(s,'/',-1)|ascii(s)|substring(bi,2,1)|s like 'a%'|s like '%b%'|s like '_b%'|s like r'Ab\%c\_d'|s like ''
s like '%'|s like 'a/%' escape '/'|s ilike 'AB%'|s not like '%a%'|s like '%_'|s like 'a%b%c'|s like 'line__'|s like r'\\'
split(s,'/')|split(s,'[/.]')|split(s,'')|split(s,'a',2)|split(s,'/',1)|get(split(s,'/'),1)|split(s,r'\.')
try_element_at(split(s,'X'),2)|size(split(s,'/'))|split(s,r'\s+')"""
PATTERNS = r"""a;^a.*b;b$;[0-9]+;(?i)AB;\bfoo;^.$;\s;(a)\1;a(?=b);[^a-z];^$;x.y;\p{L}+$;\w+=\w+;^\S+$;[\s\d];a\z;a|b$
[a-c&];^(?:ab)*$;(?s)a.b;x\x{2028}y;\Qa.b\E;\p{Alpha}\d;a++b;(?<=a)b"""
EXTRACTED = r"""([a-z]+)([0-9]+);2~([a-z]+)([0-9]+);1~(&|^)k2=([^&]*);2~^(.*?)/;1~a(x)?b;1~.*;0~(.*)$;1~(?<q>\w)\d;1
(a|b*)*c;1~http://([^/?]+)(/[^?]*)?;2"""
REPLACED = r"""[0-9];#~(a)(b);$2$1~\s+$;~b;\$~b;\\~^;>~.;.~(\w)(\w);$2-$1~A;B~[^\w];_"""
TIMES = """year(ts)|year(dt)|quarter(dt)|month(ts)|day(dt)|dayofweek(dt)|weekday(dt)|dayofyear(dt)|weekofyear(dt)|hour(ts)
minute(ts)|second(ts)|extract(second from ts)|extract(year from ts)|extract(week from dt)|extract(yearofweek from dt)
hour(nt)|date_part('doy',dt)|extract(second from nt)|date_trunc('year',ts)|date_trunc('quarter',ts)
date_trunc('month',ts)|date_trunc('week',ts)|date_trunc('day',ts)|date_trunc('hour',ts)|date_trunc('minute',ts)
date_trunc('second',ts)|date_trunc('millisecond',ts)|date_trunc('foo',ts)|trunc(dt,'MM')|trunc(dt,'year')
trunc(dt,'week')|trunc(dt,'quarter')|trunc(dt,'day')|date_format(ts,'yyyy-MM-dd')
date_format(ts,'yyyy-MM-dd HH:mm:ss.SSS')|date_format(ts,'E, d MMM yy h:mm a')|date_format(ts,'EEEE MMMM DDD')
date_format(ts,"yyyyMMdd'T'HHmmssXXX")|date_format(dt,'yyyy/Q')|date_format(ts,'SSSSSS')|date_format(ts,'Z')
date_format(nt,'HH')|to_date(dt)|unix_timestamp(ts)|unix_seconds(ts)|unix_millis(ts)|unix_micros(ts)|from_unixtime(i)
from_unixtime(i,'yyyy')|timestamp_seconds(i)|timestamp_millis(i)|timestamp_micros(l)|unix_date(dt)
date_from_unix_date(k)|to_unix_timestamp(dt)|timestamp_seconds(d)|date_add(dt,k)|date_sub(dt,k)|datediff(dt,dt2)
add_months(dt,k)|add_months(dt,1)|last_day(dt)|dt + 1|dt - 3|dt - dt2|ts - ts2|nt - nt|dt + interval 1 month
dt - interval 1 year|ts + interval 10 minutes|ts - interval 1 day|ts + interval 1 month|nt + interval 2 hours
ts + interval '1 02:03:04' day to second|ts - interval 13 month|timestampadd(HOUR,k,ts)|timestampadd(DAY,k,ts)
timestampadd(MONTH,k,ts)|timestampdiff(HOUR,ts,ts2)|timestampdiff(MONTH,ts,ts2)|timestampdiff(DAY,ts,ts2)
dt + interval 2 days|dt + interval 3 hours|ts + interval 1 minute * k|ts - ts2 < interval 1 day|try_to_timestamp(tim)
try_to_timestamp(tim,'yyyy-MM-dd')|try_to_timestamp(tim,'yyyy-MM-dd HH:mm:ss')|try_to_timestamp(tim,'yyyy-M-d')
try_to_timestamp(tim,'yyyy-MM-dd HH:mm:ss.SSSSSS')|try_to_timestamp(tim,'dd/MM/yyyy h:mm a')
try_to_date(tim,'yyyy-MM-dd')"""
NESTED = """get(a,1)|try_element_at(a,1)|try_element_at(a,-1)|size(a)|st.x|st.y|struct(i,s)|named_struct('q',f).q
array(i,j)[1]|st is null|coalesce(st.x,0)|array(i,j)|if(size(a)>0,a[0],null)"""
#: Texts that give other answers, or none, outside of ANSI mode.
BEFORE_ANSI = """i+j|l-m|l*m|by+by|by*by|i/j|f/g|f%g|l div m|l%m|pmod(l,m)|-l|-by|abs(l)|d/e|d%e|e div d|w*w|w+w|w/e|a[1]
a[k]|element_at(a,2)|split(s,'/')[1]|round(by,-2)|round(i,-9)|floor(f)|ceil(g)|cast(e as int)|cast(w as int)
cast(f as tinyint)|make_date(2000+k,n,n)|size(a)|to_date(tim)|to_date(tim,'yyyy-MM-dd')|unix_timestamp(tim)
unix_timestamp(tim,'yyyy-MM-dd')|s = i|num > 1|num + 1|cast(cast(e as decimal(12,7)) as string)|cast(f as int)
cast(l as int)|cast(i as tinyint)|cast(num as int)|cast(num as double)|cast(num as decimal(10,2))|cast(tim as date)
cast(tim as timestamp)|cast(f as timestamp)|cast(w as decimal(20,2))|cast(f as decimal(10,3))|cast(num as boolean)"""


def listed(text: str) -> list[str]:
    found = re.split(r"\||\n", text)
    return ["i | j" if each == "i " else each for each in found if each != " j"]


def with_patterns() -> list[str]:
    found = [f"s rlike r'{each}'" for each in re.split(";|\n", PATTERNS)]
    for name, text in (("regexp_extract", EXTRACTED), ("regexp_replace", REPLACED)):
        for each in re.split("~|\n", text):
            pattern, argument = each.rsplit(";", 1)
            found.append(f"{name}(s, r'{pattern}', {argument if name == 'regexp_extract' else f'''r'{argument}' '''})")
    return found


@contextmanager
def settings(spark: Any, **changed: str) -> Iterator[None]:
    """Set the time zone and the ANSI mode of the session, which others use after this test."""
    names = {
        "zone": "spark.sql.session.timeZone",
        "ansi": "spark.sql.ansi.enabled",
        "how": "spark.sql.codegen.factoryMode",
        "whole": "spark.sql.codegen.wholeStage",
        "shared": "spark.sql.subexpressionElimination.enabled",
        "policy": "spark.sql.legacy.timeParserPolicy",
    }
    before = {name: spark.conf.get(names[name]) for name in changed}
    for name, value in changed.items():
        spark.conf.set(names[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(names[name], value)


def check(spark: Any, texts: list[str], seed: int, zone: str = "UTC", count: int = 300) -> None:
    batch = rows(count, seed, zone)
    df = as_dataframe(spark, batch)
    with settings(spark, how="NO_CODEGEN", whole="false"):  # compiling the Java code of all expressions takes longer
        found = [each for at in range(0, len(texts), 60) for each in differences(spark, df, batch, texts[at : at + 60])]
    assert not found, "\n".join(found)


def test_values_are_those_of_spark(spark: Any) -> None:
    texts = [*map(listed, (LOGIC, NUMBERS, CASTS, TEXT, TIMES, NESTED))]
    check(spark, [each for group in texts for each in group] + with_patterns(), seed=1)


def test_times_go_by_the_zone_of_the_session(spark: Any) -> None:
    timed = [each for each in [*listed(TIMES), *listed(CASTS)] if re.search(r"\b(ts|ts2|nt|dt|tim)\b|timestamp", each)]
    for seed, zone in enumerate(("Europe/Berlin", "America/St_Johns", "+05:30")):
        with settings(spark, zone=zone):
            check(spark, timed, seed, zone)


def test_values_outside_of_ansi_mode_are_those_of_spark(spark: Any) -> None:
    with settings(spark, ansi="false"):
        check(spark, listed(BEFORE_ANSI), seed=2)


ONE_ROW = """1 AS a, 0 AS z, 2147483647 AS big, 9223372036854775807L AS l, 'x' AS s, 1e20D AS f, double('nan') AS nan,
array(1, 2) AS arr, cast(null as int) AS nul, -9223372036854775808L AS least, -1 AS neg"""
RAISING = """big + 1|l + 1|l * 2|-least|abs(least)|least - 1|cast(100 as tinyint) * 2Y|a / z|f / 0D|a % z|pmod(a, z)
a div z|least div neg|f % 0D|1.5 / (z * 1.0)|cast(s as int)|cast(s as double)|cast(s as date)|cast(s as timestamp)
cast(s as boolean)|cast(s as decimal(5,2))|cast(l as int)|cast(f as int)|cast(nan as int)|cast(f as decimal(5,2))
cast(f as timestamp)|cast(nan as timestamp)|arr[5]|arr[neg]|element_at(arr, 3)|element_at(arr, z)|split(s,'/')[3]
to_timestamp(s)|to_timestamp(s,'yyyy')|to_date(s)|to_date(s,'yyyy')|unix_timestamp(s,'yyyy')|make_date(2020,13,a)|floor(f)
round(big,-1)|timestamp_seconds(l)|timestampadd(YEAR, 1000000 * a, timestamp'2020-01-01')|add_months(date'2020-01-01', big)
(a / z) + nul|a in (2, a / z)|z = 0 and a / z > 1|greatest(a, a / z)|size(arr) / z|nullif(a, a / z)"""
#: A part that raises is not computed where Spark does not compute it.
SHORT_CUT = """if(z = 0, 0, a / z)|z <> 0 and a / z > 1|z = 0 or a / z > 1|coalesce(a, a / z)|nul / z|z / nul|nul + (a / z)
case when z <> 0 then a / z when a = 1 then 5 end|a in (1, a / z)|nul is null or a / z > 1|if(nul > 1, a / z, 1)|nvl(a, a / z)
floor(nan)|cast(nan as decimal(5,2))|repeat(s, neg)|substring(s, big, big)|sqrt(neg)|try_divide(a, z)"""


def condition(compute: Callable[[], object]) -> str:
    """Return the name of the error condition of a call, without its part behind the point; "no error" without one."""
    try:
        compute()
    except Exception as error:
        found = re.search(r"\[([A-Z_]+)", str(error))
        return found[1] if found else repr(error)
    return "no error"


def test_errors_are_those_of_spark(spark: Any) -> None:
    """Rows of an Arrow table, because Spark computes expressions of constants before it runs."""
    one_row = spark.range(1)
    (batch,) = one_row.selectExpr(*re.split(r", (?![^()]*\))|,\n", ONE_ROW)).toArrow().combine_chunks().to_batches()
    df = as_dataframe(spark, batch)
    found = []
    for text in listed(RAISING):
        theirs = condition(df.selectExpr(f"{text} AS v").collect)
        steps = steps_of(spark, batch.schema, lambda empty, text=text: empty.selectExpr(f"{text} AS v"))
        ours = condition(lambda steps=steps: steps.apply(batch))
        if ours != theirs or ours == "no error":
            found.append(f"{text}: Spark gives {theirs}, ours is {ours}")
    assert not found, "\n".join(found)
    # Spark computes a part that several columns share before it looks where it is needed.
    with settings(spark, shared="false"):
        assert differences(spark, df, batch, listed(SHORT_CUT)) == []


SCHEMA = pa.schema(
    {
        "auction": pa.int64(),
        "price": pa.int64(),
        "s": pa.string(),
        "ts": pa.timestamp("us", "UTC"),
        "a": pa.list_(pa.int32()),
    }
)


def one(spark: Any, text: str) -> Any:
    return steps_of(spark, SCHEMA, lambda df: df.selectExpr(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sha2(s, 256)", r"sha2\(CAST\(s AS BINARY\), 256\) cannot be computed .* no Sha2 there.*mapInArrow"),
        ("now()", "Now gives other values when rows are read again"),
        ("rand()", "Rand gives other values"),
        ("explode(a)", "several rows for a row"),
        ("sum(price)", "aggregates look at several rows"),
        ("row_number() over (order by price)", "window functions"),
        ("s like s", "the pattern of LIKE has to be a constant"),
        ("regexp_extract(s, '(a)', 2)", "has 1 groups, and none of the number 2"),
        ("s rlike '[a-z&&[^b]]'", "unions and intersections"),
        ("date_format(ts, 'G')", "the pattern 'G' has G"),
        ("s collate UNICODE = 'a'", "Collate"),
        ("a = a", "arrays, structs and intervals of months are not compared"),
        ("(select 1)", "ScalarSubquery"),
        ("transform(a, x -> x + 1)", "ArrayTransform"),
        ("price +", r"PARSE_SYNTAX_ERROR"),
        ("price + s + a", "DATATYPE_MISMATCH"),
        ("nosuch(price)", "UNRESOLVED_ROUTINE"),
    ],
)
def test_others_are_refused_by_name_when_the_flow_is_written(spark: Any, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){words}") as refused:
        one(spark, text)
    assert "'Project" not in str(refused.value)


def test_patterns_of_an_older_java_are_refused(spark: Any) -> None:
    with settings(spark, policy="LEGACY"), pytest.raises(UsageError, match="timeParserPolicy=LEGACY"):
        one(spark, "date_format(ts, 'yyyy')")


def test_a_wrong_name_gives_the_words_of_spark_and_the_columns_there_are(spark: Any) -> None:
    with pytest.raises(
        SchemaError, match=r"(?s)UNRESOLVED_COLUMN.*`price`.*There are auction BIGINT, price BIGINT, s STRING"
    ):
        steps_of(spark, SCHEMA, lambda df: df.where("pricee > 1"))


def test_operators_of_a_dataframe_become_few_steps(spark: Any) -> None:
    steps = steps_of(
        spark,
        SCHEMA,
        lambda df: (
            df.withColumn("euro", F.col("price") * 0.908)
            .where("b.auction > 3")
            .withColumnRenamed("s", "channel")
            .drop("a")
            .select("channel", "euro", "ts")
            .where(F.col("euro") > 1)
        ),
        name="b",
    )
    assert [type(each) for each in steps.chain] == [Where, Select, Where]
    assert steps.needs() == ["auction", "price", "s", "ts"]
    assert steps.needs(["ts"]) == ["auction", "price", "ts"]
    assert steps.output.names == ["channel", "euro", "ts"]
    batch = pa.record_batch(
        {
            "auction": [3, 4, 5, None],
            "price": [9, 9, 1, 9],
            "s": ["a", "b", "c", "d"],
            "ts": pa.array([1, 2, 3, 4], pa.timestamp("us", "UTC")),
        }
    )
    assert steps.apply(batch).select(["channel", "euro"]).to_pylist() == [{"channel": "b", "euro": 8.172}]
    assert comparable(steps.run(batch)[1]) == [1]
