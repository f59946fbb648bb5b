"""A kernel's compile-time parameters (`Variant`) and its runtime arguments (`FIELDS` of the argument block)."""

import math
from typing import NamedTuple

from ...call.call import HEAD_TERMS
from ...expression import Formula
from ...expression.derivative import Load
from ...expression.program import joined

# Names of the compiled functions.
FORWARD, BACKWARD, TANGENTS, TABLE = "forward", "backward", "tangents", "distance_table"
CAPTURED = "captured"
LOG2E = math.log2(math.e)


class Variant(NamedTuple):
    """The properties of a call that machine code depends on; all others are runtime arguments."""

    dtype: str  # q, k, v and out have it; such as "float32"
    vectors: int  # width of a panel of query rows
    softcap: bool = False
    bias: str | None = None  # dtype of the bias
    head_terms: tuple[str, ...] = ()  # symbols of score terms with a value for each head
    mask: bool = False
    formula: Formula | None = None  # the score_mod's
    mask_mod: Formula | None = None  # the mask function's
    wide: bool = False  # whether offsets in its tensors need 64 bits
    dropout: bool = False
    chunk: bool = False  # chunks of positions that see only themselves
    loads: tuple[Load, ...] = ()  # from the formula's tensors that have a gradient; backward only
    bias_gradient: bool = False
    slope_gradient: bool = False
    row_values: bool = False  # whether lanes of products with V, and with K in backward, run over features
    decode: bool = False  # forward only
    tiles: bool = False  # products of bfloat16 matrix tiles; forward only
    keys: str | None = None  # format of keys and values of 8 bits; forward only
    k_scales: str = ""  # whether scales of 8-bit keys differ by "head" or by "key"
    v_scales: str = ""
    tangents: tuple[str, ...] = ()  # fields of inputs with a tangent, `CAPTURED` for any of the formula's tensors

    @property
    def real_dtype(self) -> str:
        """The dtype of scores, sums and accumulators."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def key_dtype(self) -> str:
        """The dtype of keys and values in memory."""
        return self.dtype if self.keys is None else self.keys

    @property
    def modifies_scores(self) -> bool:
        """Whether every score is changed between the two products."""
        return self.has_features or self.k_scales == "key"

    @property
    def has_features(self) -> bool:
        """Whether a feature changes every score, or its visibility."""
        terms = self.bias is not None or len(self.head_terms) > 0
        return self.softcap or self.mask or terms or self.functions is not None

    @property
    def without_features(self) -> "Variant":
        """What code depends on that no feature changes: dtype, panels, products, and the units of scores, for which a
        bias stands.
        """
        return Variant(
            self.dtype,
            self.vectors,
            bias=self.real_dtype if self.natural_units else None,
            row_values=self.row_values,
            decode=self.decode,
            tiles=self.tiles,
            keys=self.keys,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            tangents=(CAPTURED,) if self.score_tangents else self.tangents[:1],
        )

    @property
    def score_tangents(self) -> bool:
        """Whether scores have a tangent."""
        return any(name not in ("v", "sinks") for name in self.tangents)

    @property
    def functions(self) -> Formula | None:
        """The formulas of score_mod and mask function in one program: results of the former, then whether a pair is
        visible.
        """
        formulas = [x for x in (self.formula, self.mask_mod) if x is not None]
        return Formula(joined(*(x.program for x in formulas)), formulas[0].tensors) if formulas else None

    @property
    def natural_units(self) -> bool:
        """Whether scores are not multiplied by `log2(e)` (see `kernels.scores`)."""
        return self.bias is not None or self.formula is not None

    @property
    def to_exp2(self) -> float:
        """The factor that converts scores to arguments of exp2."""
        return LOG2E if self.natural_units else 1.0

    @property
    def score_unit(self) -> float:
        """The factor that converts natural units to the units of scores."""
        return 1.0 if self.natural_units else LOG2E


class TableVariant(NamedTuple):
    """The properties that the code of a table of distances depends on."""

    real_dtype: str
    term: Formula
    wide: bool  # whether offsets in its tensors need 64 bits


class TaskSplit(NamedTuple):
    """The tasks of a backward pass. Each owns the gradients of its keys, and every element of dbias that it adds to."""

    tasks: int
    splits: int  # parts of the keys
    share_b: int  # 1 if one task goes through all sequences
    share_h: int


# Fields of the argument block, 8 bytes each. Strides are in elements, `work_size` in bytes. `residual` is the distance
# from lse to its residual, 0 where that is not kept. `dq` and others are gradients in backward, else tangents.
ADDRESSES = """
q k v out lse mask bias captured blocks sinks seed sequences page_table partial_out partial_lse counter workspace
dout dlse delta dq dk dv dbias dbias_error dslopes dsinks k_descale v_descale
"""
INTEGERS = """
tasks batch num_heads_kv groups seqlen_total head_dim head_dim_v panels splits chunk
q_b q_h q_s k_b k_h k_s v_b v_h v_s out_b out_h out_s lse_b lse_h lse_s
mask_b mask_h mask_i mask_j bias_b bias_h bias_i bias_j block_b block_h block_i page_size page_columns
window_left window_right top_left attention_chunk diagonal i0 j0 b0 h0 num_heads threshold work_size
dout_b dout_h dout_s dq_split dq_b dq_h dq_s dk_b dk_h dk_s dv_b dv_h dv_s
dbias_b dbias_h dbias_i dbias_j share_b share_h total_keys out_is_real residual
k_descale_b k_descale_p k_descale_n k_descale_h v_descale_b v_descale_p v_descale_n v_descale_h
"""
REALS = "factor scale softcap_scale keep_scale"
FIELDS = (
    *(ADDRESSES + INTEGERS + REALS).split(),
    *HEAD_TERMS,
    *(f"{symbol}_b" for symbol in HEAD_TERMS),
    *(f"d{symbol}_b" for symbol in HEAD_TERMS),
)
