"""Speculative decoding: draft tokens, verified together in one step of the target model.

    methods.py       METHODS: one row for each method
    config.py        SpeculativeConfig, the engine's `speculative_config`
    draft_state.py   DraftState, the speculative part of a sequence
    speculator.py    Speculator: how many draft tokens each sequence gets; all that the engine calls
    acceptance.py    measured acceptance rates and step times
    ngram.py         host methods: propose from texts, between steps
    suffix.py
    on_device/       device methods: draft in the step, after it has sampled

The step samples at each draft token as plain decoding would, with the same seed and position, and
accepts the draft tokens that equal the sampled ones. So the output is that of plain decoding.
"""
