"""Tables of docs/score_mods.md: score functions in the kernels and in FlexAttention."""

import math
import statistics

from cells import figure, markdown, paragraph, rows

CAPPED_IN_TRITON = ("soft_cap", "64")  # function and head dimension that `auto` leaves to Triton's kernels
PASSES = (("64", "forward"), ("64", "backward"), ("128", "forward"), ("128", "backward"))


def times_of() -> dict[tuple[str, str, str], dict[str, float]]:
    """Milliseconds of each implementation, by function, head dimension and pass."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows("h200-score-mod.csv"):
        key = row["function"], row["head_dim"], row["pass"]
        times.setdefault(key, {})[row["implementation"]] = float(row["ms"])
    return times


def score_mod_speed() -> str:
    """A row for each function: milliseconds of the chosen kernels, their price, and FlexAttention's time."""
    times = times_of()
    header = ["function", *(f"{name}, {head_dim} (without, Flex)" for head_dim, name in PASSES)]
    body = []
    for function in dict.fromkeys(name for name, _, _ in times):
        body.append([f"`{function}`", *(cell(function, times[function, *place], place[0]) for place in PASSES)])
    return markdown(header, body)


def cell(function: str, times: dict[str, float], head_dim: str) -> str:
    backend = "triton" if (function, head_dim) == CAPPED_IN_TRITON else "hopper"
    flex = figure(times["flex"]) if "flex" in times else "fails"
    return f"{figure(times[backend])} ({figure(times[f'{backend} plain'])}, {flex})"


def score_mod_captured() -> str:
    """A row for each measured backward pass with the gradient of the captured tensor."""
    body = [
        [f"`{function}`", head_dim, figure(x["auto"]), figure(x["flex"]) if "flex" in x else "fails"]
        for (function, head_dim, name), x in times_of().items()
        if name == "backward with captured"
    ]
    return markdown(("function", "head dimension", "flashtile", "FlexAttention"), body)


def score_mod_ratios() -> str:
    """Geometric means over FlexAttention's time, where it compiles."""
    parts = []
    for place in PASSES:
        ratios = [x["flex"] / x["auto"] for (_, *key), x in times_of().items() if tuple(key) == place and "flex" in x]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        parts.append(
            f"{place[1]} at {place[0]} {mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} functions)"
        )
    return paragraph(f"Times as fast as FlexAttention, geometric means: {'; '.join(parts)}.")


def compile_functions() -> str:
    """A row for each function: seconds of compilation of Hopper's forward and backward kernels."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows("compile-functions.csv"):
        found.setdefault(row["function"], {})[row["head_dim"], row["kernel"]] = row["seconds"]
    places = [(head_dim, f"{name}_kernel") for head_dim, name in PASSES]
    body = [[f"`{name}`", *(x.get(place, "by Triton's") for place in places)] for name, x in found.items()]
    return markdown(("function", *(f"{name}, {head_dim}" for head_dim, name in PASSES)), body)


TABLES = {
    "compile_functions": compile_functions,
    "score_mod_speed": score_mod_speed,
    "score_mod_captured": score_mod_captured,
    "score_mod_ratios": score_mod_ratios,
}
