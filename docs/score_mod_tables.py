"""Tables of docs/score_mods.md: score functions in the kernels and in FlexAttention."""

from cells import figure, markdown, rows

CAPPED_IN_TRITON = ("soft_cap", "64")  # function and head dimension that `auto` leaves to Triton's kernels
PASSES = (("64", "forward"), ("64", "backward"), ("128", "forward"), ("128", "backward"))


def score_mod_speed() -> str:
    """A row for each function: milliseconds of the chosen kernels, their price, and FlexAttention's time."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows("h200-score-mod.csv"):
        key = row["function"], row["head_dim"], row["pass"]
        times.setdefault(key, {})[row["implementation"]] = float(row["ms"])
    header = ["function", *(f"{name}, {head_dim} (without, Flex)" for head_dim, name in PASSES)]
    body = []
    for function in dict.fromkeys(name for name, _, _ in times):
        body.append([f"`{function}`", *(cell(function, times[function, *place], place[0]) for place in PASSES)])
    return markdown(header, body)


def cell(function: str, times: dict[str, float], head_dim: str) -> str:
    backend = "triton" if (function, head_dim) == CAPPED_IN_TRITON else "hopper"
    flex = figure(times["flex"]) if "flex" in times else "fails"
    return f"{figure(times[backend])} ({figure(times[f'{backend} plain'])}, {flex})"


TABLES = {"score_mod_speed": score_mod_speed}
