"""Which kernel serves which numbers: asked where one is called, and by a start that has them built ahead."""

DENSE = {"float32": "dense_f32", "bfloat16": "dense_bf16"}  # by the weight's type
ATTENTION = {  # by the types of pages and queries
    ("float32", "float32"): "attention_f32",
    ("float32", "bfloat16"): "attention_f32",
    ("uint16", "float32"): "attention_bf16_f32",
    ("uint16", "bfloat16"): "attention_bf16",
    ("bfloat16", "float32"): "attention_bf16_f32",
    ("bfloat16", "bfloat16"): "attention_bf16",
    ("int8", "float32"): "attention_int8_f32",
    ("int8", "bfloat16"): "attention_int8_bf16",
}
SAMPLING = "sampling"


def int8(dynamic: bool) -> str:
    """`dynamic`: the rows become bytes too."""
    return "int8" if dynamic else "int8_weights"


def of_model(dtype: str, quant: str | None, kv_dtype: str, experts: tuple[str | None, ...] = ()) -> tuple[str, ...]:
    """What a model calls, as far as its configuration tells: products first, since the weights wait for them.

    A kernel that is not foreseen here is built when it is called.
    """
    if quant is None:
        products = {DENSE[dtype]}
    else:
        # The head has eight bits beside any format.
        products = {int8(True), int8(quant != "int8-weights") if quant.startswith("int8") else "int4"}
    if experts:  # what they are kept in, where it is the checkpoint's own; the way to them is found in float32
        products |= {DENSE["float32"], *filter(None, experts)}
    attention = [ATTENTION[kv_dtype, dtype]] if (kv_dtype, dtype) in ATTENTION else []
    return (*sorted(products), "pack", *attention, SAMPLING)
