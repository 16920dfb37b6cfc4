"""GPU code that knows tensors and integers, and no type of the project.

A launcher checks, allocates and launches; kernel bodies lie in jit/; what a kernel must compute is
a slow function or class in reference.py, with the launcher's signature (of sampling:
llm_engine/sampler.py, with that of llm_engine/sampler_triton.py). Where work depends on the batch,
a planner makes items on the host, in numpy. Launchers raise what errors.py names.

    launcher               planner                          kernel bodies in jit/
    prefill                (chooses one of these two)
      prefill_triton       prefill_plan                     paged_prefill
      prefill_hopper       prefill_plan                     paged_prefill_hopper
    decode                 decode_plan                      paged_decode or paged_decode_hopper
    cascade                prefix_tree, cascade_plan,       cascade or cascade_hopper, and then
                           cascade_items, cascade_model     one of decode's
    merge                                                   merge
    append                                                  append
    linear, elementwise                                     linear, elementwise
    pages, digest                                           pages
    sampling                                                sampling, sampling_bins, gumbel,
                                                            edit_logits, logprobs

Bad input is refused before any launch, and changes nothing. What only the device knows, such as the
page ids in a page table, is checked in a debug mode: with PAGEWIRE_KERNEL_CHECKS=1 launchers wait
for the device and check that too (debug_checks.py; tests turn it on for some launches).

They share checks.py, tiles.py and, for attention, jit/attention_state.py; the Hopper kernels
share jit/warpgroups.py. Begin with decode: the first launch of cascade fills some of its partial
results. Why bits do not depend on the batch is told in docs/decisions/0006 and 0007, why sampling
does not sort in 0008.
"""
