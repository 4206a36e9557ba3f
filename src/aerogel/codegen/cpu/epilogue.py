"""What is applied to a finished sum before it is stored: bias, residual add, activation. All in f32, in
vectors.

NaN goes through every one of them, as it does in torch. SiLU, GELU and sigmoid use an exponential of ours (a
polynomial): LLVM's would be a call into libm on most ISAs, and its bits would differ between machines.
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu.emit import F32, I32, Emit, Value, constant

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693145751953125  # ln 2 in two pieces: n * high is exact for |n| < 2^10
_LN2_LOW = 1.42860682030941723e-6
_EXP = (1.0, 1.0, 0.5, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
_ERFC = tuple(a / 2 for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
_ERFC_REACH = 0.3275911 / 2**0.5
_VANISHES = -110.0  # under this, x * sigmoid(x) is less than half the smallest float


def activation(e: Emit, name: str, v: Value, lanes: int, parameter: Value) -> Value:
    """Apply the activation `name`; `parameter` is a vector of its number, if it carries one."""
    b, zero = e.b, constant(lanes, 0.0)
    if name == "relu":
        return _at_least(e, v, zero)
    if name == "relu6":
        return _at_most(e, _at_least(e, v, zero), constant(lanes, 6.0))
    if name == "leaky_relu":
        return b.select(b.fcmp_ordered(">", v, zero), v, b.fmul(v, parameter))
    if name == "threshold":
        return b.select(b.fcmp_ordered("<=", v, parameter), zero, v)
    if name == "hardswish":
        gate = _at_most(e, _at_least(e, b.fadd(v, constant(lanes, 3.0)), zero), constant(lanes, 6.0))
        # v * gate first would overflow near the largest floats
        return b.fmul(v, b.fmul(gate, constant(lanes, 1 / 6)))
    if name == "hardsigmoid":
        gate = b.fadd(b.fmul(v, constant(lanes, 1 / 6)), constant(lanes, 0.5))
        return _at_most(e, _at_least(e, gate, zero), constant(lanes, 1.0))
    if name == "silu":
        return _silu(e, v, lanes)
    if name == "sigmoid":
        return _sigmoid(e, v, lanes)
    if name == "gelu":
        return _gelu(e, v, lanes)
    raise ValueError(f"no emitter for activation '{name}'")


def _at_least(e: Emit, v: Value, low: Value) -> Value:
    return e.b.select(e.b.fcmp_ordered("<", v, low), low, v)  # NaN compares false and stays


def _at_most(e: Emit, v: Value, high: Value) -> Value:
    return e.b.select(e.b.fcmp_ordered(">", v, high), high, v)


def _silu(e: Emit, x: Value, lanes: int) -> Value:
    """x * sigmoid(x) with t = exp(-|x|): x / (1 + t) for x >= 0, x * t / (1 + t) below. One division serves
    both, and a result that is subnormal is rounded once."""
    b = e.b
    negative = b.fcmp_ordered("<", x, constant(lanes, 0.0))
    p, power, down = _exponential(e, b.select(negative, x, b.fneg(x)), lanes)
    one_plus = b.call(_fma(e, lanes), [b.fmul(p, power), down, constant(lanes, 1.0)])
    share = b.fdiv(b.select(negative, b.fmul(x, p), x), one_plus)
    below = b.fmul(b.fmul(share, power), down)
    below = b.select(
        b.fcmp_ordered("<", x, constant(lanes, _VANISHES)), b.fmul(x, constant(lanes, 0.0)), below
    )
    return b.select(negative, below, share)


def _sigmoid(e: Emit, x: Value, lanes: int) -> Value:
    """1 / (1 + t) with t = exp(-|x|) for x >= 0, t / (1 + t) below."""
    b = e.b
    negative = b.fcmp_ordered("<", x, constant(lanes, 0.0))
    p, power, down = _exponential(e, b.select(negative, x, b.fneg(x)), lanes)
    t = b.fmul(b.fmul(p, power), down)
    return b.fdiv(b.select(negative, t, constant(lanes, 1.0)), b.fadd(t, constant(lanes, 1.0)))


def _gelu(e: Emit, x: Value, lanes: int) -> Value:
    """x times the share of a normal distribution below it: half of erfc(|x| / sqrt 2) for x < 0, one less
    that above. erfc(z) = s P(s) exp(-z z), s = 1 / (1 + 0.33 z) (Abramowitz and Stegun, 7.1.26: to 1.5e-7).
    """
    b, fma = e.b, _fma(e, lanes)
    negative = b.fcmp_ordered("<", x, constant(lanes, 0.0))
    size = b.select(negative, b.fneg(x), x)
    s = b.fdiv(constant(lanes, 1.0), b.call(fma, [size, constant(lanes, _ERFC_REACH), constant(lanes, 1.0)]))
    tail = constant(lanes, _ERFC[-1])
    for coefficient in reversed(_ERFC[:-1]):
        tail = b.call(fma, [tail, s, constant(lanes, coefficient)])
    p, power, down = _exponential(e, b.fmul(b.fmul(x, x), constant(lanes, -0.5)), lanes)
    tail = b.fmul(b.fmul(tail, s), b.fmul(b.fmul(p, power), down))
    return b.fmul(x, b.select(negative, tail, b.fsub(constant(lanes, 1.0), tail)))


def _exponential(e: Emit, minus: Value, lanes: int) -> tuple[Value, Value, Value]:
    """exp(v), v <= 0, as p * 2^n = p * 2^(n + 64) * 2^-64: the first power is never subnormal."""
    b, fma = e.b, _fma(e, lanes)
    floats, ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
    clamped = _at_least(e, minus, constant(lanes, _VANISHES))
    scaled = b.call(fma, [clamped, constant(lanes, _LOG2E), constant(lanes, -0.5)])
    n = b.fptosi(scaled, ints)  # clamped <= 0, so truncation rounds to nearest
    n = b.select(b.fcmp_unordered("uno", minus, minus), ir.Constant(ints, [0] * lanes), n)
    turns = b.sitofp(n, floats)
    r = b.call(fma, [turns, constant(lanes, -_LN2_HIGH), clamped])
    r = b.call(fma, [turns, constant(lanes, -_LN2_LOW), r])
    p = constant(lanes, _EXP[-1])
    for coefficient in reversed(_EXP[:-1]):
        p = b.call(fma, [p, r, constant(lanes, coefficient)])
    return p, _power(e, n, 64, lanes), constant(lanes, 2.0**-64)


def _fma(e: Emit, lanes: int) -> Value:
    floats = ir.VectorType(F32, lanes)
    name = f"llvm.fmuladd.v{lanes}f32"
    found = e.b.module.globals.get(name)
    return found or ir.Function(e.b.module, ir.FunctionType(floats, [floats] * 3), name)


def _power(e: Emit, n: Value, more: int, lanes: int) -> Value:
    """2^(n + more) for -126 <= n + more <= 127, by writing the exponent."""
    ints = ir.VectorType(I32, lanes)
    bits = e.b.shl(e.b.add(n, ir.Constant(ints, [127 + more] * lanes)), ir.Constant(ints, [23] * lanes))
    return e.b.bitcast(bits, ir.VectorType(F32, lanes))
