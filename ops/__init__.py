"""Numerical operations: functions from arrays to arrays. They know neither requests nor the model
configuration.

Names carry their dimensions as capital suffixes that match the letters of an einsum:

    T tokens of a step    N query heads            P pages
    B sequences           K key-value heads        S slots per page
    R sampled tokens      G heads per KV head      M pages per sequence
    D model width         H head size              C tiles of query tokens
    F feed-forward width  E experts                Q query tokens per tile
    V vocabulary          X experts per token      J key positions per block
    Y keys and values of all KV heads: 2K
    Z pairs of a token and one of its experts      n devices
"""
