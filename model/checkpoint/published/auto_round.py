"""What AutoRound says of a checkpoint, whose matrices lie as GPTQ's or AWQ's do: the modules of those read them.

Modules may have bits and groups of their own, by name or by a regular expression that is searched for in names.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...stored_format import StoredFormat, StoredGroup
from .integers import Integers, group_of, truth, whole_number
from .keys import HERE, known, patterns, refusal

PACKINGS = {  # how matrices lie: whose module reads them, and GPTQ's version
    "auto_round:auto_gptq": ("gptq", 1), "auto_round:gptq": ("gptq", 1), "auto_round": ("gptq", 2),
    "auto_round:gptqmodel": ("gptq", 2), "auto_round:auto_awq": ("awq", 2), "auto_round:awq": ("awq", 2),
}  # fmt: skip
WIDE = (16, 32)  # bits of what is left dense, and of rows
# What one module may say too. Of activations, only that they stay as they are.
SCHEME = {
    "bits": ..., "group_size": ..., "sym": ..., "data_type": ("int", "float"), "act_bits": WIDE, "act_group_size": ...,
    "act_sym": ..., "act_dynamic": ..., "act_data_type": ..., "super_bits": (), "super_group_size": (),
    "scale_dtype": ...,
}  # fmt: skip
KEYS = SCHEME | {
    "quant_method": ("auto-round", "intel/auto-round", "auto_round"), "packing_format": tuple(PACKINGS),
    "extra_config": ..., "block_name_to_quantize": ..., "to_quant_block_names": ..., "quant_block_list": ...,
    "desc_act": (False,), "rotation_configs": ([],), "backend": ..., "autoround_version": ..., "amp": ...,
    "batch_size": ..., "enable_minmax_tuning": ..., "enable_norm_bias_tuning": (False,), "enable_quanted_input": ...,
    "gradient_accumulate_steps": ..., "iters": ..., "lr": ..., "low_gpu_mem_usage": ..., "minmax_lr": ...,
    "model_free": ..., "nsamples": ..., "seqlen": ..., "supported_types": ..., "static_attention_dtype": ...,
    "static_kv_dtype": ..., "static_attention_granularity": ..., "static_kv_granularity": ..., "damp_percent": ...,
    "true_sequential": ..., "dataset": ..., "provider": ..., "quant_lm_head": ...,
}  # fmt: skip


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    said = known(HERE, config, KEYS)
    packing = said.get("packing_format")
    if packing is None:
        raise refusal(f"{HERE}.packing_format", packing, " or ".join(map(repr, PACKINGS)))
    method, version = PACKINGS[packing]
    extra = said.get("extra_config", {})
    if not isinstance(extra, dict):
        raise refusal(f"{HERE}.extra_config", extra, "an object of modules")
    groups, ignore = [], []
    for name, scheme in extra.items():
        where = f"{HERE}.extra_config.{name}"
        targets = patterns(where, [pattern(name)])
        own = {key: said[key] for key in SCHEME if key in said} | known(where, scheme, SCHEME)
        if own.get("bits") in WIDE:
            ignore += targets
        else:
            groups.append(group(method, version, own, targets))
    groups.sort(key=lambda group: group.targets[0].startswith("re:"))  # names before patterns
    every = (*groups, group(method, version, said, ("Linear",)))
    return StoredFormat(method, every, ("lm_head", "embed_tokens", *ignore), parts=True, rounds_head=False)


def pattern(name: str) -> str:
    """A name of a module as it is; else a regular expression that may begin anywhere."""
    if re.fullmatch(r"[\w.]+", name):
        return name
    return f"re:{name if name.startswith(('.*', '^')) else f'.*{name}'}"


def group(method: str, version: int, said: Mapping[str, Any], targets: tuple[str, ...]) -> StoredGroup:
    """How the modules of one scheme are kept."""
    if said.get("data_type", "int") != "int":
        raise refusal(f"{HERE}.data_type", said["data_type"], "'int'")
    bits = whole_number(said, "bits", *((4,) if method == "awq" else (2, 3, 4, 8)))
    size = whole_number(said, "group_size", -1, 16, 32, 64, 128, 256, 512, 1024)
    centred = truth(said, "sym", True) and method == "gptq"
    kept = group_of(Integers(bits, size, centred=centred, version=version))
    return StoredGroup(kept.quant, kept.form, targets)
