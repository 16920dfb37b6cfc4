"""GPU code that knows tensors and integers, and no type of the project.

Each operation has a folder:

    launch.py       checks, allocates, launches
    plan.py         where work depends on the batch: makes items on the host, in numpy
    bodies.py       kernel bodies in Triton
    bodies_*.py     more of them; bodies_hopper.py in Gluon, for Hopper GPUs, with the same bits
    reference.py    what a launcher must compute: slow functions and classes in torch and float32

    operation       what it does
    prefill         attention of prompt tokens; launch.py chooses launch_triton or launch_hopper
    decode          attention of one token per request
    cascade         decode that reads a shared prefix once: prefix_tree, items, model (of costs),
                    plan; then one of decode's kernels
    merge           attention states over disjoint keys become one
    append          rotates, and writes to pages
    linear          matrix products whose rows have the same bits in any batch
    elementwise     norm with residual, gated activation
    pages           copies of pages; launch_digest
    seats           what running sequences keep on the device between steps
    sampling        draws; its reference is llm_engine/sampler.py (llm_engine/sampler_triton.py has
                    the same signature)

A reference has the signature of its launcher: the same parameters in the same order, of the same
kinds and with the same defaults. Left out is only what says how a kernel does it: tiles, programs,
where keys are cut, what another kernel has done before, a prefix tree that is known. It checks
nothing.

Launchers raise what errors.py names. Bad input is refused before any launch, and changes nothing.
What only the device knows, such as the page ids in a page table, is checked in a debug mode: with
PAGEWIRE_KERNEL_CHECKS=1 launchers wait for the device and check that too (debug_checks.py; tests
turn it on for some launches).

All share checks.py and tiles.py, attention shares attention_state.py, and the Hopper kernels
share warpgroups.py. Begin with decode: the first launch of cascade fills some of its partial
results. Why bits do not depend on the batch is told in docs/decisions/0006 and 0007, why sampling
does not sort in 0008.
"""
