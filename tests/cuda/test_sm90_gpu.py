"""The kernels for Hopper on a Hopper GPU: `pytest -m gpu`.

All ranks live in this process and share the GPU, each with its streams and its share of multiprocessors;
their workspaces are ordinary memory of the device. Both kinds of kernels also meet in one flight.
"""

from __future__ import annotations

from ctypes import byref, c_void_p, create_string_buffer
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pyruntime.cuda import library as abi
from pyruntime.cuda import why_not
from pyruntime.cuda.kernels import DTYPES, LAYOUTS, address, pitch
from pyruntime.cuda.library import Library
from tests.cuda import cases


def reason() -> str:
    if why_not():
        return why_not()
    capability = torch.cuda.get_device_capability()
    return "" if capability == (9, 0) else f"the GPU has compute capability {capability}, not (9, 0)."


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(reason()), reason=reason() or "there is a Hopper")]

ROUNDS = 3
DEADLINE_S = 5.0
"""Of ranks in one process, whose kernels have all been loaded."""


def call(library: Library, kernels: str, name: str, *arguments) -> None:
    """`kernels`: "sm90" or "portable"."""
    prefix = "pyruntime_sm90_" if kernels == "sm90" else "pyruntime_"
    code = getattr(library._library, prefix + name)(*arguments)
    assert code == 0, library._library.pyruntime_error().decode()


def request(layout: str, a: Tensor, b: Tensor, c: Tensor, m: int, tiles: int, bias: Tensor | None = None):
    n, k = b.shape if layout == "NT" else b.shape[::-1]
    pointers = dict(zip("ab", map(address, (a, b)), strict=True)) | {"bias": address(bias), "c": address(c)}
    pitches = {"lda": pitch(a, "A"), "ldb": pitch(b, "B"), "ldc": pitch(c, "C")}
    return abi.Matmul(DTYPES[a.dtype], LAYOUTS[layout], tiles, m, n, k, **pointers, **pitches)


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """NaNs, with rows that TMA can address whatever `columns` is."""
    return torch.full((rows, (columns + 7) // 8 * 8), float("nan"), dtype=dtype, device="cuda")[:, :columns]


def aligned(matrix: Tensor) -> Tensor:
    """The same numbers, on the device, with rows that TMA can address."""
    copy = poisoned(*matrix.shape, matrix.dtype)
    return copy.copy_(matrix)


def product_alone(
    library: Library, layout: str, a: Tensor, b: Tensor, m: int, n: int, tiles: int, **more
) -> Tensor:
    c = poisoned(m, n, a.dtype)
    call(library, "sm90", "matmul", byref(request(layout, a, b, c, m, tiles, **more)), None)
    return c


@dataclass
class Ranks:
    """A group whose ranks share this GPU."""

    library: Library
    shape: abi.Workspace
    deadline_s: float = DEADLINE_S
    memory: list[Tensor] = field(default_factory=list)
    calls: int = 0

    def __post_init__(self) -> None:
        world = range(self.shape.world_size)
        size = self.library.workspace_bytes(self.shape)
        self.memory = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in world]
        self.addresses = (c_void_p * len(self.memory))(*(memory.data_ptr() for memory in self.memory))
        self.streams = [torch.cuda.Stream() for _ in world]
        self.push_streams = [torch.cuda.Stream(priority=-1) for _ in world]
        for memory in self.memory:
            self.library.call("prepare_workspace", byref(self.shape), memory.data_ptr(), None)
        torch.cuda.synchronize()
        # Blocks come in pairs.
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.share = (multiprocessors - 16) // len(self.memory) // 2 * 2

    def view(self, rank: int) -> abi.Group:
        return abi.Group(self.shape, rank, self.calls % abi.SLOTS, int(self.deadline_s * 1e9), self.addresses)

    def gather(self, kernels: list[str], products: list[abi.Matmul], order: list[int]) -> None:
        for rank in order:
            group, product = byref(self.view(rank)), products[rank]
            product.most_blocks = self.share
            self.library.call("push_chunk", group, byref(product), 0, 2, self.push_streams[rank].cuda_stream)
            stream = self.streams[rank].cuda_stream
            call(self.library, kernels[rank], "all_gather_matmul", group, byref(product), 0, stream)
        self.calls += 1

    def scatter(self, kernels: list[str], products: list[abi.Matmul], order: list[int]) -> None:
        for rank in order:
            product, stream = products[rank], self.streams[rank].cuda_stream
            product.most_blocks = self.share
            group = byref(self.view(rank))
            call(self.library, kernels[rank], "matmul_reduce_scatter", group, byref(product), stream)
        self.calls += 1

    def failure(self, rank: int) -> str:
        torch.cuda.synchronize()
        found, sentence = abi.Failure(), create_string_buffer(500)
        self.library.call("failure", byref(self.view(rank)), byref(found), None)
        self.library.call("describe_failure", byref(found), sentence, 500)
        return sentence.value.decode()


@pytest.fixture(scope="module")
def library() -> Library:
    """With every kernel of these tests loaded: to load one while another spins may take for ever."""
    loaded = Library()
    for kernels in ("sm90", "portable"):
        for dtype in (torch.bfloat16, torch.float16):
            for layout in LAYOUTS:
                for tiles in (abi.SMALL, abi.LARGE):
                    load(loaded, kernels, dtype, layout, tiles)
    torch.cuda.synchronize()
    return loaded


def load(library: Library, kernels: str, dtype: torch.dtype, layout: str, tiles: int) -> None:
    a, b = (aligned(x) for x in cases.operands(layout, 16, 16, 16, dtype))
    c = poisoned(16, 16, dtype)
    product = request(layout, a, b, c, 16, tiles)
    call(library, kernels, "matmul", byref(product), None)
    scatters = Ranks(library, scatter_shape(library, 1, 16, 16, dtype))
    scatters.scatter([kernels], [product], [0])
    if layout != "TN":
        gathers = Ranks(library, gather_shape(library, 1, 16, 16, dtype, 1))
        gathers.gather([kernels], [product], [0])


def gather_shape(
    library: Library, world: int, m: int, k: int, dtype: torch.dtype, pieces: int
) -> abi.Workspace:
    shape = abi.Workspace()
    library.call("gather_workspace", world, m, k, DTYPES[dtype], pieces, byref(shape))
    return shape


def scatter_shape(library: Library, world: int, m: int, n: int, dtype: torch.dtype) -> abi.Workspace:
    shape = abi.Workspace()
    library.call("scatter_workspace", world, m, n, DTYPES[dtype], byref(shape))
    return shape


@pytest.mark.parametrize("tiles", [abi.SMALL, abi.LARGE])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul_is_the_product_in_fp64(library, dtype, layout, tiles):
    for m, n, k in [
        (256, 256, 64),
        (128, 512, 1024),
        (1, 8, 8),
        (1000, 777, 333),
        (2051, 1030, 513),
        (300, 260, 65),
    ]:
        a, b = cases.operands(layout, m, n, k, dtype)
        bias = torch.randn(n).to(dtype)
        on_device = [aligned(a), aligned(b)]
        seen = product_alone(library, layout, *on_device, m, n, tiles, bias=bias.cuda())
        wanted = cases.product(layout, a, b) + bias.double()
        assert cases.error_in_roundings(seen, wanted, dtype) < 1, (m, n, k)
        again = product_alone(library, layout, *on_device, m, n, tiles, bias=bias.cuda())
        assert torch.equal(seen, again), (m, n, k)
        pad = seen.as_strided((m, seen.stride(0)), (seen.stride(0), 1))[:, n:]
        assert pad.isnan().all()  # nothing is written beyond a row's end


CASES = [
    (2, 512, 256, 128, 1),
    (3, 1000, 777, 333, 4),
    (4, 2050, 1032, 520, 3),
    (2, 129, 136, 72, 7),
    (4, 3, 40, 24, 2),
]
BOTH = [("sm90", "sm90"), ("sm90", "portable")]


@pytest.mark.parametrize("pair", BOTH)
@pytest.mark.parametrize("tiles", [abi.SMALL, abi.LARGE])
@pytest.mark.parametrize(("world", "m", "n", "k", "pieces"), CASES)
@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_gather_gives_every_bit_of_the_product_of_all_rows(
    library, layout, world, m, n, k, pieces, tiles, pair
):
    dtype = torch.bfloat16
    ranks = Ranks(library, gather_shape(library, world, m, k, dtype, pieces))
    kernels = [pair[rank % 2] for rank in range(world)]
    for number in range(ROUNDS):
        x, _ = cases.operands(layout, m, n, k, dtype)
        weights = [aligned(cases.operands(layout, m, n, k, dtype)[1]) for _ in range(world)]
        shards = [aligned(shard) for shard in x.tensor_split(world)]
        outs = [poisoned(m, n, dtype) for _ in range(world)]
        products = [request(layout, *of, m, tiles) for of in zip(shards, weights, outs, strict=True)]
        torch.cuda.synchronize()
        ranks.gather(kernels, products, [(number + rank) % world for rank in range(world)])
        assert [ranks.failure(rank) for rank in range(world)] == ["nothing failed"] * world
        for rank in range(world):
            wanted = cases.product(layout, x, weights[rank].cpu())
            assert cases.error_in_roundings(outs[rank], wanted, dtype) < 1
            if kernels[rank] == "sm90":
                assert torch.equal(
                    outs[rank], product_alone(library, layout, aligned(x), weights[rank], m, n, tiles)
                )


@pytest.mark.parametrize("pair", BOTH)
@pytest.mark.parametrize("tiles", [abi.SMALL, abi.LARGE])
@pytest.mark.parametrize(("world", "m", "n", "k", "_pieces"), CASES)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_scatter_sums_rounded_parts_in_rank_order(library, layout, world, m, n, k, _pieces, tiles, pair):
    dtype = torch.bfloat16
    ranks = Ranks(library, scatter_shape(library, world, m, n, dtype))
    kernels = [pair[rank % 2] for rank in range(world)]
    bias = torch.randn(n).to(dtype).cuda()
    for number in range(ROUNDS):
        pairs = [[aligned(x) for x in cases.operands(layout, m, n, k, dtype)] for _ in range(world)]
        outs = [poisoned(len(rows), n, dtype) for rows in torch.arange(m).tensor_split(world)]
        products = [request(layout, *pairs[rank], outs[rank], m, tiles, bias) for rank in range(world)]
        torch.cuda.synchronize()
        ranks.scatter(kernels, products, [(number + rank) % world for rank in range(world)])
        assert [ranks.failure(rank) for rank in range(world)] == ["nothing failed"] * world
        exact = sum(cases.product(layout, *(x.cpu() for x in pair)) for pair in pairs) + bias.cpu().double()
        sums = torch.zeros(m, n, device="cuda")
        for operands in pairs:
            sums += product_alone(library, layout, *operands, m, n, tiles).float()
        sums = (sums + bias.float()).to(dtype).tensor_split(world)
        for rank in range(world):
            assert cases.error_in_roundings(outs[rank], exact.tensor_split(world)[rank], dtype) < 1
            if set(kernels) == {"sm90"}:
                assert torch.equal(outs[rank], sums[rank])


def test_rows_that_do_not_come_end_in_a_record_and_no_result(library):
    m, n, k = 1024, 512, 256
    ranks = Ranks(library, gather_shape(library, 2, m, k, torch.bfloat16, 2), deadline_s=0.2)
    a, b = (aligned(x) for x in cases.operands("NT", m // 2, n, k, torch.bfloat16))
    out = poisoned(m, n, torch.bfloat16)
    product = request("NT", a, b, out, m, abi.LARGE)
    call(library, "sm90", "all_gather_matmul", byref(ranks.view(0)), byref(product), 0, None)
    said = ranks.failure(0)
    assert said.startswith("all_gather_matmul, rank 0 waiting for rank 1 to send chunk ")
    assert said.endswith("into slot 0 (expected epoch 1, seen 0): the deadline has passed.")
    assert ranks.failure(1) == said  # which has been told
    assert out[m // 2 :].isnan().all()


def test_parts_that_do_not_come_end_in_a_record_and_no_result(library):
    m, n, k = 1024, 512, 256
    ranks = Ranks(library, scatter_shape(library, 2, m, n, torch.bfloat16), deadline_s=0.2)
    a, b = (aligned(x) for x in cases.operands("NT", m, n, k, torch.bfloat16))
    out = poisoned(m // 2, n, torch.bfloat16)
    product = request("NT", a, b, out, m, abi.SMALL)
    call(library, "sm90", "matmul_reduce_scatter", byref(ranks.view(0)), byref(product), None)
    assert ranks.failure(0).startswith("matmul_reduce_scatter, rank 0 waiting for rank 1 to send chunk ")
    assert out.isnan().all()


def test_a_captured_graph_gives_right_results_at_every_replay(library):
    world, m, n, k, dtype = 2, 640, 384, 192, torch.bfloat16
    ranks = Ranks(library, scatter_shape(library, world, m, n, dtype))
    pairs = [[poisoned(m, k, dtype), poisoned(n, k, dtype)] for _ in range(world)]
    outs = [poisoned(m // world, n, dtype) for _ in range(world)]
    products = [request("NT", *pairs[rank], outs[rank], m, abi.LARGE) for rank in range(world)]
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph):
        before.record()
        for stream in ranks.streams:
            stream.wait_event(before)
        ranks.scatter(["sm90"] * world, products, list(range(world)))
        for stream in ranks.streams:
            torch.cuda.current_stream().wait_stream(stream)
    for number in range(1000):
        torch.manual_seed(number)
        for pair in pairs:
            for operand in pair:
                operand.normal_()
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        if number % 50 == 0:
            exact = sum(cases.product("NT", *(x.cpu() for x in pair)) for pair in pairs).tensor_split(world)
            for rank in range(world):
                assert cases.error_in_roundings(outs[rank], exact[rank], dtype) < 1, number
        assert not any(out.isnan().any() for out in outs), number
    assert ranks.failure(0) == "nothing failed"
