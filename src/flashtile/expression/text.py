"""Programs as text that reads like the formula: operators of Python, shared parts with names of their own."""

from collections import Counter

from .operations import CALL, COMPARISON, OPERATIONS, UNARY
from .program import INTEGERS, REAL, Instruction, Program, number

Text = tuple[str, int]  # and the precedence of its outermost operator


def text(program: Program) -> str:
    """A line for each shared part, and one with the results."""
    uses = Counter(n for x in program.instructions for n in x.operands) + Counter(program.outputs)
    lines: list[str] = []
    found: list[Text] = []
    for n, x in enumerate(program.instructions):
        source = program.instructions[x.operands[0]].kind if x.operands else ""
        whole = of_instruction(x, [found[m] for m in x.operands], source)
        if uses[n] > 1 and x.op not in ("constant", "input", "size", "cast", "neg"):
            name = f"x{len(lines)}"
            lines.append(f"{name} = {whole[0]}")
            whole = name, CALL
        found.append(whole)
    return "\n".join([*lines, ", ".join(found[n][0] for n in program.outputs)])


def of_instruction(x: Instruction, operands: list[Text], source: str) -> Text:
    match x.op:
        case "constant":
            value = number(x)
            return f"{value:g}" if x.kind == REAL and float(f"{value:g}") == value else str(value), CALL
        case "input":
            return str(x.value), CALL
        case "size":
            return f"tensor{x.value[0]}.shape[{x.value[1]}]", CALL
        case "load":
            indices = f"[{', '.join(t for t, _ in operands)}]" if operands else ""
            return f"tensor{x.value}{indices}", CALL
        case "cast":
            whole = x.kind in INTEGERS and source == REAL
            return (f"int({operands[0][0]})", CALL) if whole else operands[0]  # others are implied, as in Python
        case "round":
            return f"{x.value}({operands[0][0]})", CALL
    operation = OPERATIONS[x.op]
    if operation.precedence == CALL:
        return operation.text.format(*(t for t, _ in operands)), CALL
    least, shown = operation.precedence, []
    for n, (operand, precedence) in enumerate(operands):
        # A right operand, as that of `-`, needs brackets around an operator of the same precedence; so does a left one
        # of a comparison, which Python would chain.
        enough = least + 1 if n > 0 or least in (UNARY, COMPARISON) else least
        shown.append(operand if precedence >= enough else f"({operand})")
    return operation.text.format(*shown), least
