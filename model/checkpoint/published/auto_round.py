"""AutoRound checkpoints, whose matrices have GPTQ's or AWQ's layout and are read by those modules.

Modules may have their own bits and group size, by name or by a regular expression.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...stored_format import StoredFormat, StoredGroup
from .integers import IntegerLayout, checked_bool, checked_int, make_group
from .keys import CONFIG_KEY, checked_entries, checked_patterns, unsupported_value

PACKINGS = {  # (module that reads the layout, GPTQ version)
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptq": ("gptq", 1),
    "auto_round": ("gptq", 2),
    "auto_round:gptqmodel": ("gptq", 2),
    "auto_round:auto_awq": ("awq", 2),
    "auto_round:awq": ("awq", 2),
}
WIDE = (16, 32)  # bits of unquantised weights and activations
# Keys that single modules may set too. Activations must stay unquantised.
SCHEME = {
    "bits": ...,
    "group_size": ...,
    "sym": ...,
    "data_type": ("int", "float"),
    "act_bits": WIDE,
    "act_group_size": ...,
    "act_sym": ...,
    "act_dynamic": ...,
    "act_data_type": ...,
    "super_bits": (),
    "super_group_size": (),
    "scale_dtype": ...,
}
KEYS = SCHEME | {
    "quant_method": ("auto-round", "intel/auto-round", "auto_round"),
    "packing_format": tuple(PACKINGS),
    "extra_config": ...,
    "block_name_to_quantize": ...,
    "to_quant_block_names": ...,
    "quant_block_list": ...,
    "desc_act": (False,),
    "rotation_configs": ([],),
    "backend": ...,
    "autoround_version": ...,
    "amp": ...,
    "batch_size": ...,
    "enable_minmax_tuning": ...,
    "enable_norm_bias_tuning": (False,),
    "enable_quanted_input": ...,
    "gradient_accumulate_steps": ...,
    "iters": ...,
    "lr": ...,
    "low_gpu_mem_usage": ...,
    "minmax_lr": ...,
    "model_free": ...,
    "nsamples": ...,
    "seqlen": ...,
    "supported_types": ...,
    "static_attention_dtype": ...,
    "static_kv_dtype": ...,
    "static_attention_granularity": ...,
    "static_kv_granularity": ...,
    "damp_percent": ...,
    "true_sequential": ...,
    "dataset": ...,
    "provider": ...,
    "quant_lm_head": ...,
}


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    settings = checked_entries(CONFIG_KEY, config, KEYS)
    packing = settings.get("packing_format")
    if packing is None:
        raise unsupported_value(
            f"{CONFIG_KEY}.packing_format", packing, " or ".join(map(repr, PACKINGS))
        )
    method, version = PACKINGS[packing]
    extra_config = settings.get("extra_config", {})
    if not isinstance(extra_config, dict):
        raise unsupported_value(f"{CONFIG_KEY}.extra_config", extra_config, "an object of modules")
    groups = []
    ignore = []
    for name, scheme in extra_config.items():
        key_path = f"{CONFIG_KEY}.extra_config.{name}"
        targets = checked_patterns(key_path, [module_pattern(name)])
        module_settings = {
            key: settings[key] for key in SCHEME if key in settings
        } | checked_entries(key_path, scheme, SCHEME)
        if module_settings.get("bits") in WIDE:
            ignore += targets
        else:
            groups.append(scheme_group(method, version, module_settings, targets))
    groups.sort(key=lambda group: group.targets[0].startswith("re:"))  # names before patterns
    all_groups = (*groups, scheme_group(method, version, settings, ("Linear",)))
    return StoredFormat(
        method,
        all_groups,
        ("lm_head", "embed_tokens", *ignore),
        match_substrings=True,
        rounds_head=False,
    )


def module_pattern(name: str) -> str:
    """A module name unchanged, or a regular expression that may match anywhere."""
    if re.fullmatch(r"[\w.]+", name):
        return name
    return f"re:{name if name.startswith(('.*', '^')) else f'.*{name}'}"


def scheme_group(
    method: str, version: int, settings: Mapping[str, Any], targets: tuple[str, ...]
) -> StoredGroup:
    """The stored group for the modules of one scheme."""
    if settings.get("data_type", "int") != "int":
        raise unsupported_value(f"{CONFIG_KEY}.data_type", settings["data_type"], "'int'")
    bits = checked_int(settings, "bits", *((4,) if method == "awq" else (2, 3, 4, 8)))
    size = checked_int(settings, "group_size", -1, 16, 32, 64, 128, 256, 512, 1024)
    centred = checked_bool(settings, "sym", True) and method == "gptq"
    base_group = make_group(IntegerLayout(bits, size, centred=centred, version=version))
    return StoredGroup(base_group.quant, base_group.form, targets)
