"""The command line: usage, versions, exit codes. The benchmarks themselves run in tests/spark."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import flux
from controller.operate import cli


def run(*arguments: str):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(cli.app, list(arguments))


def test_the_version_is_the_packages() -> None:
    assert run("--version").output == f"flux {flux.__version__}\n"


OPERATING = (
    "list",
    "status",
    "top",
    "partitions",
    "rebalance",
    "move",
    "drain",
    "scale",
    "protect",
    "fail",
    "history",
    "metrics",
)


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("bench",),
        ("bench", "throughput"),
        ("bench", "latency"),
        ("bench", "failover"),
        *((name,) for name in OPERATING),
    ],
)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert run(*command, "-h").output == result.output


@pytest.mark.parametrize(
    "arguments", [("bench", "throughput", "--rows", "0"), ("bench", "throughput", "--source", "disk"), ("nonsense",)]
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_an_error_of_ours_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    def fail() -> None:
        raise flux.UsageError("too few task slots")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "flux: too few task slots\n"


def test_python_m_flux_is_the_command() -> None:
    printed = subprocess.run([sys.executable, "-m", "flux", "--version"], capture_output=True, text=True, timeout=200)
    assert printed.stdout == f"flux {flux.__version__}\n"
