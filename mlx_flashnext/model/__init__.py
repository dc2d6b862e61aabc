"""The target model `qwen4_exp`: one file per part, arrays in, arrays out.

Entry point: `flashnext.FlashNext`. Read `layer.py` first: a layer is PLE (in one layer), a mixer (`gdn.py` or
`qsa.py`) and a mixture of experts (`moe.py`), each reading and writing the residual stack through `hyper.py`.

Invariants:
M1. Nothing here waits for the device except through `host.py`.
M2. A call changes no sequence state until the whole block has been built: an error leaves the state as it
    was.
M3. Token by token, any chunking and one block give the same bits on the CPU backend, in logits and in every
    state.

Shapes in every file: T positions of the block, D hidden, G residual streams, E experts, K experts per token,
S slots, V vocabulary, N n-gram heads, R rows of a sub-block, B index blocks, A attended tokens of a sparse
row.
"""
