"""GPU code that knows tensors and integers, and no type of the project.

A launcher checks, allocates and launches; kernel bodies lie in jit/; reference.py has a slow
function for each kernel of attention and pages. Where work depends on the batch, a planner makes
items on the host, in numpy and without a device. All raise what errors.py names.

    launcher               planner                          kernel bodies in jit/
    prefill                                                 (chooses one of the next two)
      prefill_triton       prefill_plan                     paged_prefill
      prefill_hopper       prefill_plan                     paged_prefill_hopper
    decode                 decode_plan                      paged_decode
    cascade                prefix_tree, cascade_plan,       cascade or cascade_hopper, and then
                           cascade_items, cascade_model     paged_decode
    merge                                                   merge
    append                                                  append
    linear, elementwise                                     linear, elementwise
    pages, digest                                           pages
    sampling                                                sampling, sampling_bins, gumbel,
                                                            edit_logits, logprobs

What they share: checks, tiles, and jit/attention_state.py, the arithmetic of attention.
Start with decode: prefill has no splits, and cascade ends in decode. Why bits do not depend on the
batch: docs/decisions/0006, 0007; how sampling does without sorting: 0008.
"""
