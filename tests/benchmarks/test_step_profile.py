"""How a profile is summed up: what is busy, what is idle, and which part a kernel belongs to."""

from types import SimpleNamespace

from torch._C._autograd import DeviceType

from benchmarks.step_profile import Span, folder_of_kernel, part_of, spans_of, summary


def test_time_in_which_kernels_overlap_counts_once_and_gaps_are_idle() -> None:
    spans = [
        Span("linear_hopper_kernel", 0.0, 3000.0),
        Span("rms_norm_kernel", 2000.0, 4000.0),
        Span("linear_kernel", 2500.0, 3500.0),  # within the two before
        Span("Memcpy DtoH (Device -> Pinned)", 6000.0, 7000.0),
        Span("void at::native::index_kernel", 7000.0, 8000.0),
    ]

    found = summary(spans[::-1], num_steps=2)

    assert found == {
        "busy_ms": 3.0,
        "idle_ms": 1.0,
        "parts_ms": {"linear": 2.0, "elementwise": 1.0, "torch": 0.5, "copies": 0.5},
    }


def test_each_kernel_is_found_in_its_folder() -> None:
    folders = folder_of_kernel()

    assert folders["paged_decode_hopper_kernel"] == "decode"
    assert folders["shared_prefix_kernel"] == "cascade"
    assert folders["write_seats_kernel"] == "seats"
    assert {"append", "linear", "prefill", "sampling"} <= set(folders.values())
    assert part_of("Memset (Device)") == "copies"
    assert part_of("ampere_sgemm_128x64_tn") == "torch"


def test_only_what_ran_on_the_device_counts() -> None:
    where = {"aten::sum": DeviceType.CPU, "draw_kernel": DeviceType.CUDA}
    events = [
        SimpleNamespace(
            name=name, device_type=device, time_range=SimpleNamespace(start=1.0, end=2.0)
        )
        for name, device in where.items()
    ]

    assert spans_of(events) == [Span("draw_kernel", 1.0, 2.0)]
