"""What NCCL, and PyTorch's symmetric memory for an all-reduce, need on this machine, for the ratios in benches/results.

python3 benches/peers.py: one process a GPU, all GPUs of the machine (two at least). bf16, in graphs of up to 50 calls:
microseconds a call, median of the graphs, the slowest rank. Bytes count as in nccl-tests: all ranks' parts together, where
there are parts. NVLink multicast stays off.
"""

import os
import statistics

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing as multiprocessing

SIZES = [512, 2 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
COLUMNS = ["all-reduce", "one-shot", "two-shot", "gather", "scatter", "broadcast", "to-all"]


def time_graph(call, calls, graphs):
    """Median microseconds of one call, of this rank."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    times = []
    for _ in range(graphs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            graph.replay()  # keeps the ranks in step while the timed one is enqueued
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def slowest(call, size):
    try:
        mine = time_graph(call, *((50, 30) if size <= 16 << 20 else (5, 10)))
    except Exception as error:  # an operation that this version or machine does not have
        mine = f"{type(error).__name__}: {error}"[:80]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    failed = [found for found in everyone if isinstance(found, str)]
    return failed[0] if failed else f"{max(everyone):.2f}"


def work(rank, world):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29631", rank=rank, world_size=world)
    name = dist.group.WORLD.group_name
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"# NCCL {nccl}, PyTorch {torch.__version__}, {world} x {torch.cuda.get_device_name()}; us per call", flush=True)
        print("# all-reduce by NCCL, one-shot and two-shot by PyTorch; by NCCL all-gather, reduce-scatter, broadcast, all-to-all", flush=True)
        print(f"{'bytes':>10} " + " ".join(f"{name:>10}" for name in COLUMNS), flush=True)
    for size in SIZES:
        whole = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
        other, part = torch.empty_like(whole), whole.chunk(world)[rank].clone()
        shared = symm_mem.empty(min(size, 64 << 20) // 2, dtype=torch.bfloat16, device="cuda")
        symm_mem.rendezvous(shared, name)
        shared.zero_()
        found = [
            slowest(lambda: dist.all_reduce(whole), size),
            slowest(lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name), size) if size <= 4 << 20 else "-",
            slowest(lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name), size) if size <= 64 << 20 else "-",
            slowest(lambda: dist.all_gather_into_tensor(other, part), size),
            slowest(lambda: dist.reduce_scatter_tensor(part, whole), size),
            slowest(lambda: dist.broadcast(whole, 0), size),
            slowest(lambda: dist.all_to_all_single(other, whole), size),
        ]
        if rank == 0:
            print(f"{size:>10} " + " ".join(f"{text:>10}" for text in found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("this needs two GPUs")
    multiprocessing.spawn(work, args=(world,), nprocs=world)
