"""How it is computed: arrays in, arrays out. Nothing here knows a request or a model's
configuration.

Names carry their dimensions as capital suffixes that match the letters of an einsum:

    T rows of a step      N query heads        P pages
    B sequences           K key-value heads    S slots a page
    R sampled rows        G heads a KV head    M pages a sequence
    D model width         H head size          C tiles of query rows
    F feed-forward width  E experts            Q query rows a tile
    V vocabulary          X experts a token    J key positions a block
    Y a key and a value of each KV head: 2K
    Z pairs of a row and one of its experts   n devices
"""
