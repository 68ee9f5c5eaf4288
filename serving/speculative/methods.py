"""The methods of speculative decoding, in one table."""

from typing import NamedTuple


class Method(NamedTuple):
    """How a method proposes draft tokens.

    `module` names a module of this package. That of a host method has `make_drafter(config)`, a
    `HostDrafter`; that of a device method has `load_drafter(context)`, a `DraftSource`.
    """

    module: str
    on_device: bool = False  # drafts within the step, after it has sampled; else between steps
    is_model: bool = False  # drafts with a whole model, or a part of the target
    needs_folder: bool = False  # `model` names the folder or repository of its weights
    # It has KV pages of its own, and must prefill the text before it can draft after it.
    needs_draft_prefill: bool = False


METHODS = {
    "ngram": Method(".ngram"),
    "suffix": Method(".suffix"),
    "draft_model": Method(
        ".on_device.draft_model", True, is_model=True, needs_folder=True, needs_draft_prefill=True
    ),
    "self": Method(".on_device.target_layers", True, is_model=True),
    "medusa": Method(".on_device.medusa", True, needs_folder=True),
    "eagle": Method(".on_device.eagle", True, needs_folder=True),
    "eagle3": Method(".on_device.eagle", True, needs_folder=True),
    "mtp": Method(".on_device.eagle", True),
}
