"""The reference accelerator inside SGLang: what stands for a GPU, and nothing else.

The scheduler, the radix tree and HiCache are SGLang's own, without sgl_kernel and with no installed file changed. What
is not SGLang's is here; harness/engines/sglang/replaced.py lists each function, what it stands for, and why, and every
run's manifest and report repeat that list.

    models/paced.py   attention layers of the real shape, no weights, no arithmetic; SGLang imports the folder
    steps.py          when a step begins, and when none follows
    hicache.py        HiCache's host pool between two memories that are both RAM
    streams.py        copies beside the scheduler, as CUDA's streams do them
"""


def register_in_sglang() -> None:
    """Called by SGLang in each of its processes, before it makes its scheduler."""
    from .hicache import replace_copies
    from .steps import pace_steps

    pace_steps()
    replace_copies()
