"""Powers, exponentials and logarithms, bit for bit as StrictMath of Java, which Spark calls.

Java prescribes the algorithms of fdlibm (Sun Microsystems, 1993; e_pow.c, e_exp.c, e_log.c, e_log10.c), whose last
digit is sometimes not the nearest one. They are written here as operations on columns. Each operation is one of IEEE
754, so that all machines give the same; functions of the C library do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flux.expressions.kernels.values import Bools, Floats, Ints

_LN2_HI, _LN2_LO = 6.93147180369123816490e-01, 1.90821492927058770002e-10
#: Coefficients of the exponential, from x**2 on.
_P = (
    1.66666666666666019037e-01,
    -2.77777777770155933842e-03,
    6.61375632143793436117e-05,
    -1.65339022054652515390e-06,
    4.13813679705723846039e-08,
)
#: Coefficients of the logarithm to base 2 inside of powers.
_L = (
    5.99999999999994648725e-01,
    4.28571428578550184252e-01,
    3.33333329818377432918e-01,
    2.72728123808534006489e-01,
    2.30660745775561754067e-01,
    2.06975017800338417784e-01,
)
_LG = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
_HIGH = np.int64(-0x1_0000_0000)


def _polynomial(at: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Return a polynomial in the order of Horner."""
    total: Any = coefficients[-1]
    for each in reversed(coefficients[:-1]):
        total = each + at * total
    return np.asarray(total, np.float64)


def _bits(numbers: Floats) -> Ints:
    return np.ascontiguousarray(numbers, np.float64).view(np.int64)


def _high_word(numbers: Floats) -> Ints:
    return _bits(numbers) >> 32


def _with_high_word(numbers: Floats, word: Ints) -> Floats:
    return ((_bits(numbers) & np.int64(0xFFFF_FFFF)) | (word << 32)).view(np.float64)


def _cut(numbers: Floats) -> Floats:
    """Return numbers whose low 32 bits are zero."""
    return (_bits(numbers) & _HIGH).view(np.float64)


def _parts(numbers: Floats) -> tuple[Floats, Ints, Ints]:
    """Return positive numbers, scaled up to normal ones where they are not, with their high words and their own exponents.
    Numbers without a logarithm are 1."""
    small = numbers < 2.0**-1022
    x = np.where(np.isfinite(numbers) & (numbers > 0), np.where(small, numbers * 2.0**54, numbers), 1.0)
    word = _high_word(x)
    return x, word, np.where(small & (numbers > 0), -54, 0) + (word >> 20) - 1023


def exp(numbers: Floats) -> Floats:
    with np.errstate(all="ignore"):
        usual = np.where(np.isfinite(numbers) & (np.abs(numbers) < 800), numbers, 0.0)
        word = _high_word(np.abs(usual))
        sign = np.where(usual < 0, -1, 1)
        several = np.trunc(1.44269504088896338700 * usual + 0.5 * sign)
        scale = np.where(word <= 0x3FD62E42, 0, np.where(word < 0x3FF0A2B2, sign, several))
        high, low = usual - scale * _LN2_HI, scale * _LN2_LO
        rest = np.where(scale == 0, usual, high - low)
        square = rest * rest
        c = rest - square * _polynomial(square, _P)
        plain = 1.0 - ((rest * c) / (c - 2.0) - rest)
        scaled = 1.0 - ((low - (rest * c) / (2.0 - c)) - high)
        found = np.ldexp(np.where(scale == 0, plain, scaled), scale.astype(np.int32))
        found = np.where(word < 0x3E300000, 1.0 + usual, found)
        found = np.where(numbers > 7.09782712893383973096e02, np.inf, found)
        found = np.where(numbers < -7.45133219101941108420e02, 0.0, found)
        return np.where(np.isnan(numbers), np.nan, found)


def log(numbers: Floats) -> Floats:
    with np.errstate(all="ignore"):
        x, word, exponent = _parts(numbers)
        fraction = word & 0xFFFFF
        up = (fraction + 0x95F64) & 0x100000
        x = _with_high_word(x, fraction | (up ^ 0x3FF00000))
        exponent = exponent + (up >> 20)
        k = exponent.astype(np.float64)
        f = x - 1.0
        s = f / (2.0 + f)
        z = s * s
        w = z * z
        t1 = w * (_LG[1] + w * (_LG[3] + w * _LG[5]))
        t2 = z * (_LG[0] + w * (_LG[2] + w * (_LG[4] + w * _LG[6])))
        r = t2 + t1
        half = 0.5 * f * f
        middle = ((fraction - 0x6147A) | (0x6B851 - fraction)) > 0
        inner = np.where(middle, f - (half - s * (half + r)), f - s * (f - r))
        with_half = k * _LN2_HI - ((half - (s * (half + r) + k * _LN2_LO)) - f)
        without = k * _LN2_HI - ((s * (f - r) - k * _LN2_LO) - f)
        found = np.where(exponent == 0, inner, np.where(middle, with_half, without))
        tiny = f * f * (0.5 - 0.33333333333333333 * f)
        close = np.where(exponent == 0, f - tiny, k * _LN2_HI - ((tiny - k * _LN2_LO) - f))
        close = np.where(f == 0, np.where(exponent == 0, 0.0, k * _LN2_HI + k * _LN2_LO), close)
        found = np.where((0xFFFFF & (2 + fraction)) < 3, close, found)
        return _at_the_ends_of_logarithms(numbers, found)


def _at_the_ends_of_logarithms(numbers: Floats, found: Floats) -> Floats:
    found = np.where(numbers == 0, -np.inf, found)
    found = np.where(numbers == np.inf, np.inf, found)
    return np.where(np.isnan(numbers) | (numbers < 0), np.nan, found)


def log10(numbers: Floats) -> Floats:
    with np.errstate(all="ignore"):
        x, word, exponent = _parts(numbers)
        below = np.where(exponent < 0, 1, 0)
        x = _with_high_word(x, (word & 0xFFFFF) | ((0x3FF - below) << 20))
        y = (exponent + below).astype(np.float64)
        z = y * 3.69423907715893078616e-13 + 4.34294481903251816668e-01 * log(x)
        return _at_the_ends_of_logarithms(numbers, z + y * 3.01029995663611771306e-01)


def log2(numbers: Floats) -> Floats:
    return log(numbers) / float(log(np.array([2.0]))[0])


def power(x: Floats, y: Floats) -> Floats:
    """Raise to a power."""
    with np.errstate(all="ignore"):
        whole = np.trunc(y) == y
        odd = whole & (np.abs(y) < 2.0**53) & (np.fmod(y, 2.0) != 0)
        size = np.abs(x)
        usual = np.isfinite(x) & np.isfinite(y) & (size != 0) & (size != 1)
        found = _usual_power(np.where(usual, size, 2.0), np.where(usual, y, 1.0))
        found = np.where(usual, found, _odd_power(size, y))
        found = np.where(((x < 0) | ((x == 0) & np.signbit(x))) & odd, -found, found)
        found = np.where((x < 0) & np.isfinite(x) & np.isfinite(y) & ~whole, np.nan, found)
        found = np.where(y == 0.5, np.where(x == -np.inf, np.inf, np.sqrt(x + 0.0)), found)
        found = np.where(y == 2.0, x * x, found)
        found = np.where(y == 1.0, x, np.where(y == -1.0, 1.0 / x, found))
        found = np.where(np.isinf(y) & (size == 1), np.nan, found)
        return np.where(y == 0, 1.0, np.where(np.isnan(x) | np.isnan(y), np.nan, found))


def _odd_power(size: Floats, y: Floats) -> Floats:
    """Return powers of 0, 1 and infinity, and those to infinite exponents."""
    grows = np.where(size > 1, y > 0, y < 0)
    return np.where(size == 1, 1.0, np.where(grows, np.inf, 0.0))


def _usual_power(x: Floats, y: Floats) -> Floats:
    """Return powers of finite positive numbers other than 1."""
    t1, t2 = _logarithm(x)
    huge = np.abs(y) > 2.0**31
    if huge.any():
        h1, h2 = _logarithm_near_one(x)
        t1, t2 = np.where(huge, h1, t1), np.where(huge, h2, t2)
    y1 = _cut(y)
    low, high = (y - y1) * t1 + y * t2, y1 * t1
    z = low + high
    over = (z > 1024.0) | ((z == 1024.0) & (low + 8.0085662595372944372e-17 > z - high))
    under = (z < -1075.0) | ((z == -1075.0) & (low <= z - high))
    found = _power_of_two(np.where(over | under, 0.0, high), np.where(over | under, 0.0, low))
    found = np.where(over, np.inf, np.where(under, 0.0, found))
    word = _high_word(x)
    # So large exponents of numbers that are not next to 1 are beyond any number.
    certain = (np.abs(y) > 2.0**64) | (huge & ((word < 0x3FEFFFFF) | (word > 0x3FF00000)))
    grows = np.where(x > 1, y > 0, y < 0)
    return np.where(certain, np.where(grows, np.inf, 0.0), found)


def _logarithm(x: Floats) -> tuple[Floats, Floats]:
    """Return the logarithm to base 2, as the sum of two numbers."""
    small = x < 2.0**-1022
    x = np.where(small, x * 2.0**53, x)
    word = _high_word(x)
    n = np.where(small, -53, 0) + (word >> 20) - 0x3FF
    fraction = word & 0xFFFFF
    word = fraction | 0x3FF00000
    middle: Bools = (fraction > 0x3988E) & (fraction < 0xBB67A)
    upper = fraction >= 0xBB67A
    n, word = n + upper, np.where(upper, word - 0x100000, word)
    base = np.where(middle, 1.5, 1.0)
    x = _with_high_word(x, word)
    u, v = x - base, 1.0 / (x + base)
    s = u * v
    s_high = _cut(s)
    t_word = ((word >> 1) | 0x20000000) + 0x00080000 + (middle.astype(np.int64) << 18)
    t_high = (t_word << 32).view(np.float64)
    t_low = x - (t_high - base)
    s_low = v * ((u - s_high * t_high) - s_high * t_low)
    square = s * s
    r = square * square * _polynomial(square, _L)
    r = r + s_low * (s_high + s)
    square = s_high * s_high
    t_high = _cut(3.0 + square + r)
    t_low = r - ((t_high - 3.0) - square)
    u, v = s_high * t_high, s_low * t_high + t_low * s
    p_high = _cut(u + v)
    p_low = v - (p_high - u)
    z_high = 9.61796700954437255859e-01 * p_high
    z_low = (
        -7.02846165095275826516e-09 * p_high
        + p_low * 9.61796693925975554329e-01
        + np.where(middle, 1.35003920212974897128e-08, 0.0)
    )
    shift = np.where(middle, 5.84962487220764160156e-01, 0.0)
    t = n.astype(np.float64)
    t1 = _cut(((z_high + z_low) + shift) + t)
    return t1, z_low - (((t1 - t) - shift) - z_high)


def _logarithm_near_one(x: Floats) -> tuple[Floats, Floats]:
    t = x - 1.0
    w = (t * t) * (0.5 - t * (0.3333333333333333333333 - t * 0.25))
    u = 1.44269502162933349609 * t
    v = t * 1.92596299112661746887e-08 - w * 1.44269504088896338700
    t1 = _cut(u + v)
    return t1, v - (t1 - u)


def _power_of_two(high: Floats, low: Floats) -> Floats:
    """Return 2 to the sum of two numbers."""
    z = low + high
    size = np.abs(z)
    n = np.floor(size)
    n = np.where(size > 0.5, n + (size - n >= 0.5), 0.0)
    n = np.copysign(n, z)
    high = high - n
    t = _cut(low + high)
    u = t * 6.93147182464599609375e-01
    v = (low - (t - high)) * 6.93147180559945286227e-01 + t * -1.90465429995776804525e-09
    z = u + v
    w = v - (z - u)
    t = z * z
    t1 = z - t * _polynomial(t, _P)
    r = (z * t1) / (t1 - 2.0) - (w + z * w)
    return np.ldexp(1.0 - (r - z), n.astype(np.int32))
