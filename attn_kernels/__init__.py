"""GPU code that knows tensors and integers, but no type of the project.

Each operation has a folder:

    launch.py       checks, allocates, launches
    plan.py         if work depends on the batch: makes items on the host, in numpy
    bodies.py       kernel bodies in Triton
    bodies_*.py     more of them; bodies_hopper.py in Gluon, for Hopper GPUs, with the same bits
    reference.py    the definition of a launcher's result: slow code in torch and float32
    reference_*.py  more of it

    operation       what it does
    prefill         attention of prompt tokens; launch.py chooses launch_triton or launch_hopper
    decode          attention of one token per request
    cascade         decode that reads a shared prefix once: prefix_tree, items, model (of costs),
                    plan; then one of decode's kernels
    append          rotates, and writes to pages
    linear          matrix products whose rows have the same bits in any batch
    elementwise     norm, with the residual before it
    pages           copies of pages; launch_digest
    seats           state of running sequences on the device between steps
    sampling        draws; rows.py has what launcher and reference take and give

A reference has the signature of its launcher: the same parameters in the same order, of the same
kinds and with the same defaults. It omits only parameters of the implementation: tiles, programs,
where keys are cut, the work of another kernel, a known prefix tree. It checks nothing.

Launchers raise the errors in errors.py. They refuse bad input before any launch, and nothing
changes. A debug mode checks values that only the device knows, such as page ids in a page table:
with PAGEWIRE_KERNEL_CHECKS=1 launchers wait for the device and check them, too (debug_checks.py;
tests turn it on for some launches). Inside `compiling_ahead` launches compile and do not run
(compile_ahead.py).

All operations share checks.py and tiles.py, attention shares attention_state.py, and the Hopper
kernels share warpgroups.py. Begin with decode: the first launch of cascade fills some of its
partial results. docs/decisions/0006 and 0007 explain why bits do not depend on the batch, 0008 why
sampling does not sort.
"""
