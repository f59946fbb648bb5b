"""Formulas in LLVM IR: each instruction of random programs, on odd values, against torch operations in float64."""

import ctypes
import functools
import importlib
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from cpu_widths import WIDTHS, request_width
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashtile.expression.builder import Builder, Node
from flashtile.expression.operations import OPERATIONS
from flashtile.expression.program import BOOL, INPUTS, INTEGERS, REAL, Instruction, Program, TensorType, number, type_of

captured, codegen, formula, jit, o, stages, support, targets = (
    importlib.import_module(f"flashtile.backend.cpu.{name}")
    for name in (
        "kernels.captured", "kernels.codegen", "kernels.formula", "jit", "kernels.operands", "kernels.stages",
        "support", "targets",
    )
)  # fmt: skip
KEYS, ROWS = 5, 32
B, FIRST_KEY = 1, 2
INF, NAN = math.inf, math.nan
ODD = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-45, 1e38, -3e38, 88.6, -87.4, -103.9, 5.9, 0.99, 2.0**24, 2.5]
DTYPES = ["float32", "float64", "bfloat16", "float16", "bool", "int8", "uint8", "int16", "int32", "int64"]


class Inputs(NamedTuple):
    """Inputs of a program; rows are lanes of several vectors."""

    score: Tensor  # [keys, rows]
    h: Tensor  # [rows], int32
    q_idx: Tensor
    tensors: list[Tensor]

    def types(self) -> tuple[TensorType, ...]:
        return tuple(type_of(x) for x in self.tensors)


# Generated code -------------------------------------------------------------------------------------------------------


def source(program: Program, types: tuple[TensorType, ...], dtype: torch.dtype, wide: bool) -> str:
    """`f(results, score, h, q_idx, table)`, which writes each result as a double or a 64-bit integer."""
    code = codegen.Code(targets.host(), o.DOUBLE if dtype is torch.float64 else o.FLOAT)
    with code.function("f", *[o.ADDRESS] * 5, public=True) as args:
        score, h, q_idx = code.pointer(args[1]), code.pointer(args[2], o.INT), code.pointer(args[3], o.INT)
        tensors = captured.Captured(code, types, code.pointer(args[4], o.LONG), wide)
        emitter = formula.Emitter(code, tensors, code.constant(B, o.INT))
        with code.loop(0, ROWS, code.lanes) as row:
            rows = {"h": h.vector(row), "q_idx": q_idx.vector(row)}
            staged = stages.StagedCode(stages.staged(program), emitter, rows)
            with code.loop(0, KEYS) as j:
                values = staged.at_key(code.convert(j + FIRST_KEY, o.INT), score.vector(j * ROWS + row))
                for m, (x, kind) in enumerate(zip(values, program.kinds(), strict=True)):
                    stored = o.DOUBLE if kind == REAL else o.LONG
                    x = code.splat(code.convert(x, stored, signed=kind != BOOL))
                    code.pointer(args[0], stored).store(x, (j * len(values) + m) * ROWS + row)
    return str(code.module)


@functools.lru_cache(maxsize=1)
def engine_of(source: str, target: Any) -> Any:
    machine = jit.target_machine(targets.processor(target.width))
    engine = jit.llvm.create_mcjit_compiler(jit.llvm.parse_assembly(""), machine)
    engine.add_object_file(jit.llvm.ObjectFileRef.from_data(jit.compile_object(source, machine)))
    engine.finalize_object()
    return engine


def evaluated(program: Program, inputs: Inputs, dtype: torch.dtype, wide: bool = False) -> list[Tensor]:
    """Each result of a program in generated code, `[keys, rows]`: float64, int64 or bool."""
    engine = engine_of(source(program, inputs.types(), dtype, wide), targets.host())
    results = torch.zeros((KEYS, len(program.outputs), ROWS), dtype=torch.int64)
    table = torch.tensor([n for x in inputs.tensors for n in (x.data_ptr(), *x.shape, *x.stride())] + [0])
    memory = [results, inputs.score, inputs.h, inputs.q_idx, table]
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5)(engine.get_function_address("f"))(*(x.data_ptr() for x in memory))
    return [
        x.view(torch.float64) if kind == REAL else x.bool() if kind == BOOL else x
        for x, kind in zip(results.transpose(0, 1).contiguous(), program.kinds(), strict=True)
    ]


# Reference ------------------------------------------------------------------------------------------------------------


def reference(x: Instruction, operands: list[Tensor], inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The value of one instruction on these operands, and where it has one."""
    anywhere = torch.ones((KEYS, ROWS), dtype=torch.bool)
    a, b = (operands[0], operands[-1]) if operands else (anywhere, anywhere)
    match x.op:
        case "constant":
            value = number(x)
            return torch.full((KEYS, ROWS), value, dtype=torch.float64 if x.kind == REAL else None), anywhere
        case "input":
            keys = torch.arange(FIRST_KEY, FIRST_KEY + KEYS)[:, None]
            values = dict(
                zip(INPUTS, (inputs.score.double(), torch.tensor(B), inputs.h, inputs.q_idx, keys), strict=True)
            )
            return values[x.value].expand(KEYS, ROWS), anywhere
        case "size":
            return torch.tensor(inputs.tensors[x.value[0]].shape[x.value[1]]).expand(KEYS, ROWS), anywhere
        case "load":
            tensor = inputs.tensors[x.value]
            exists = anywhere
            for index, size in zip(operands, tensor.shape, strict=True):
                exists = exists & (index >= 0) & (index < size)
            outside = torch.full((KEYS, ROWS), NAN) if x.kind == REAL else torch.zeros((KEYS, ROWS), dtype=torch.int64)
            values = tensor.to(dtype if x.kind == REAL else tensor.dtype)
            if exists.any():
                found = values[tuple(torch.where(exists, index, 0) for index in operands)]
                return torch.where(exists, found, outside.to(found.dtype)), anywhere
            return outside, anywhere
        case "cast" if x.kind == REAL:
            return a.to(dtype), anywhere
        case "cast" if x.kind == BOOL:
            return a != 0, anywhere
        case "cast":
            limit = 2.0**31 if x.kind == "int32" else 2.0**63
            return a.long(), a.abs() < limit if a.dtype is torch.float64 else anywhere
        case "round":
            return a.float().to(getattr(torch, x.value)), anywhere
        case "floordiv" | "mod":
            defined = (b != 0) & (b != -1)
            return OPERATIONS[x.op].torch(a, torch.where(defined, b, 1)), defined
        case "sigmoid":
            return torch.where(a < 0, a.exp(), 1) / (1 + (-a.abs()).exp()), anywhere  # subnormal results too
        case "sign" if x.kind == REAL:
            return torch.where(a.isnan(), a, a.sign()), anywhere
    return OPERATIONS[x.op].torch(*operands), anywhere


def assert_instructions_right(program: Program, inputs: Inputs, dtype: torch.dtype, wide: bool = False) -> None:
    """Compare each instruction's results with its reference on the results of its operands."""
    everything = program._replace(outputs=tuple(range(len(program.instructions))))
    results = evaluated(everything, inputs, dtype, wide)
    info = torch.finfo(dtype)
    for x, got in zip(program.instructions, results, strict=True):
        operands = [results[n] for n in x.operands]
        expected, defined = reference(x, operands, inputs, dtype)
        if x.kind == REAL:
            expected = expected.double()
            if dtype is torch.float32:  # which has infinities where float64 has none
                expected = torch.where(expected.abs() > info.max * (1 + info.eps / 4), expected.sign() * INF, expected)
            error = (got - expected).abs() / (info.eps * expected.abs() + info.smallest_normal * info.eps)
            good = (got == expected) | (got.isnan() & expected.isnan()) | (error <= 6)
        else:
            good = got == expected
        wrong = ~good & defined
        if wrong.any():
            at = tuple(wrong.nonzero()[0])
            values = [y[at].item() for y in operands]
            raise AssertionError(f"{x}: {got[at]} of {values}, not {expected[at]}; {int(wrong.sum())} wrong")


# Random programs ------------------------------------------------------------------------------------------------------


def random_inputs(random_: random.Random, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(random_.randrange(2**31))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    score = (randn(KEYS, ROWS) * 10 ** (2 * randn(KEYS, ROWS))).to(dtype)
    odd = torch.tensor([random_.choice(ODD) for _ in range(KEYS * ROWS)]).reshape(KEYS, ROWS).to(dtype)
    score = torch.where(randn(KEYS, ROWS) > 0.5, odd, score)
    tensors = []
    for name in random_.sample(DTYPES, 4):
        shape = [
            random_.choice((0, 1, 3, 8) if random_.random() < 0.2 else (5, 40, 70)) for _ in range(random_.randrange(4))
        ]
        x = (randn(*shape) * 30).to(getattr(torch, name))
        tensors.append(x.transpose(0, -1) if x.dim() > 1 and random_.random() < 0.5 else x)
    h = torch.arange(ROWS, dtype=torch.int32) % random_.choice((1, 2, 3))
    return Inputs(score, h, torch.arange(ROWS, dtype=torch.int32) // 2 + random_.randrange(30), tensors)


def random_program(random_: random.Random, inputs: Inputs) -> Program:
    builder = Builder(inputs.types())
    nodes = [builder.input(name) for name in INPUTS]
    nodes += [builder.constant(random_.choice(values)) for values in (ODD, [0, 3, -7, 32], [True], [0.37, -1.5])]
    nodes += [builder.size(n, d) for n, x in enumerate(inputs.tensors) for d in range(x.dim())]

    def index() -> Node:
        """Mostly an index inside of a tensor."""
        x = builder.input(random_.choice(INPUTS[1:]))
        if random_.random() < 0.4:
            x = builder.op("sub", x, builder.input(random_.choice(INPUTS[1:])))
        if random_.random() < 0.2:
            x = random_.choice([node for node in nodes if node.kind in INTEGERS])
        return x

    for _ in range(12):
        tensor = random_.randrange(len(inputs.tensors))
        nodes.append(builder.load(tensor, [index() for _ in range(inputs.tensors[tensor].dim())]))
    for _ in range(40):
        name = random_.choice([*OPERATIONS, "round", "cast"])
        if name == "round":
            nodes.append(
                builder.round(builder.cast(random_.choice(nodes), REAL), random_.choice(("bfloat16", "float16")))
            )
        elif name == "cast":
            nodes.append(builder.cast(random_.choice(nodes), random_.choice((REAL, "int64", BOOL))))
        else:
            count = OPERATIONS[name].text.count("{}")
            kinds = INTEGERS if name in ("floordiv", "mod") else (*INTEGERS, BOOL) if name in BITWISE else None
            choice = [x for x in nodes if kinds is None or x.kind in kinds]
            nodes.append(builder.op(name, *random_.choices(choice, k=count)))
    return builder.program(*nodes)


BITWISE = ("and_", "or_", "xor", "not_")


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([torch.float32, torch.float64]), wide=st.booleans())
def test_random_programs(seed: int, dtype: torch.dtype, wide: bool) -> None:
    random_ = random.Random(seed)
    inputs = random_inputs(random_, dtype)
    assert_instructions_right(random_program(random_, inputs), inputs, dtype, wide)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_reals(width: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function, over the whole range of exponents and near the numbers where formulas change."""
    request_width(width, monkeypatch)
    builder = Builder(())
    x = builder.input("score")
    functions = [name for name, f in OPERATIONS.items() if f.operands == REAL and f.text.count("{}") == 1]
    nodes = [builder.op(name, x) for name in functions]
    for name in ("bfloat16", "float16"):
        nodes.append(builder.round(x, name))
    program = builder.program(*nodes, builder.cast(x, "int64"))
    info = torch.finfo(dtype)
    low, high = math.log(info.smallest_normal * info.eps), math.log(info.max)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)

        def uniform(first: float, last: float, generator: torch.Generator = generator) -> Tensor:
            return first + (last - first) * torch.rand((KEYS, ROWS), generator=generator, dtype=torch.float64)

        for values in (
            uniform(low, high).exp() * uniform(-1, 1).sign(), uniform(-3, 3), uniform(0.5, 2), uniform(low, high),
            uniform(-8, 8), uniform(high - 2, high + 2), uniform(low - 2, low + 40), uniform(-30, 30).round() / 2,
        ):  # fmt: skip
            zeros = torch.zeros(ROWS, dtype=torch.int32)
            assert_instructions_right(program, Inputs(values.to(dtype), zeros, zeros, []), dtype)
