"""Names of the kernels by dtypes. The modules of weight formats name the formats' kernels."""

DENSE = {"float32": "dense_f32", "bfloat16": "dense_bf16"}  # by the weight's dtype
ATTENTION = {  # by the dtypes of pages and queries
    ("float32", "float32"): "attention_f32",
    ("float32", "bfloat16"): "attention_f32",
    ("uint16", "float32"): "attention_bf16_f32",
    ("uint16", "bfloat16"): "attention_bf16",
    ("bfloat16", "float32"): "attention_bf16_f32",
    ("bfloat16", "bfloat16"): "attention_bf16",
    ("int8", "float32"): "attention_int8_f32",
    ("int8", "bfloat16"): "attention_int8_bf16",
    ("uint8", "float32"): "attention_int4_f32",
    ("uint8", "bfloat16"): "attention_int4_bf16",
}
# Kernels that round activations to int8 in groups, by the kernel for the same format that does not.
ROUNDING = {
    name: f"{name}_a8"
    for name in (
        "int4",
        "mxfp4",
        "float4",
        "iq4",
        "iq4_levels",
        "uint4",
        "uint4_half",
        "uint4_levels",
        "uint5_half",
        "uint6_levels",
        "int8_groups",
    )
}
# Kernels that multiply bfloat16 activations with weights of a format.
CODE_KERNELS = (
    "fp8",
    "int8_groups",
    "int8_weights",
    "int4",
    "mxfp4",
    "float4",
    "nf4",
    "fp4",
    "iq4",
    "uint4",
    "uint4_half",
    "uint4_levels",
    "uint5_half",
    "uint6_levels",
    "iq4_levels",
)
# Their replacements for float32 activations.
FLOAT_ROWS = {name: f"{name}_f32" for name in CODE_KERNELS} | {DENSE["bfloat16"]: DENSE["float32"]}
ADAPTER = "adapter"
HEADS = "heads"
RESIDUAL = "residual"
SAMPLING = "sampling"
DELTA_NET = "delta_net"
BLANK = "blank"
UNPACK = "unpack"
