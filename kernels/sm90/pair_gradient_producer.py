"""Shared memory and tiles of the kernel for gradients of what score changes captured, and its producer warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from ..versions import async_load
from .lib.mma import WG_ROWS, accumulator, as_matrix
from .lib.pair_tiles import PairTensor, pair_bytes
from .lib.pipeline import Pipeline, new_barriers, new_buffers
from .lib.scheduler import COMPUTE, STOP, TileScheduler, claim_tile, new_scheduler
from .lib.struct import struct
from .lib.tile_map import TileMap


@struct
class Tensors:
    """Tensors in global memory: TMA descriptors, numbers of each row of q, and the workspace.

    target: the gradient of what has an element for each pair. sums: a pointer, used for what has not.
    SAME_PAIRS: whether all batch entries and heads that share a tile of the gradient read one tile of ``pairs``.
    """

    q: tma.tensor_descriptor
    dout: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    target: tma.tensor_descriptor
    sums: gl.tensor
    pairs: PairTensor
    lse2: gl.tensor
    delta: gl.tensor
    workspace: gl.tensor
    SAME_PAIRS: gl.constexpr


@struct
class Operands:
    """A pipeline of the operands of a product: for each consumer 64 rows, and the keys; see `Pipeline`."""

    rows: Pipeline
    keys: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, of_rows, of_keys, batch, head, kv_head, row, column, n):
        """Load the n-th tiles of both descriptors."""
        stage = self.rows.stage(n)
        self.rows.wait_empty(n)
        full = self.rows.full_barrier(n)
        ROWS: gl.constexpr = 2 * WG_ROWS + of_keys.block_shape[2]
        mbarrier.expect(full, 2 * ROWS * of_rows.block_shape[3])
        for group in gl.static_range(2):
            rows = self.rows.buffers.index(2 * stage + group)
            async_load(of_rows, [batch, head, row + group * WG_ROWS, 0], full, rows)
        async_load(of_keys, [batch, kv_head, column, 0], full, self.keys.index(stage))

    @gluon.jit
    def start(self, n, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_K: gl.constexpr):
        """Issue the product of the n-th tiles when they have arrived."""
        stage = self.rows.stage(n)
        self.rows.wait_full(n)
        zeros = gl.zeros([WG_ROWS, TILE_K], gl.float32, accumulator(TILE_K))
        rows = as_matrix(self.rows.buffers.index(2 * stage + CONSUMER), WG_ROWS, HEAD_DIM)
        keys = as_matrix(self.keys.index(stage), TILE_K, HEAD_DIM).permute((1, 0))
        return warpgroup_mma(rows, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def new_operands(of_rows, of_keys, STAGES: gl.constexpr):
    """Allocate them."""
    rows = Pipeline(new_buffers(of_rows, 2 * STAGES), new_barriers(STAGES, 1), new_barriers(STAGES, 2), STAGES)
    return Operands(rows, new_buffers(of_keys, STAGES))


@struct
class SharedMemory:
    """What warps share.

    pairs: a tile for each consumer, in a single stage; not used without a `PairTensor`. sums: a tile for each consumer,
    not used where CTAs walk.
    """

    scheduler: TileScheduler
    qk: Operands
    gradients: Operands
    pairs: Pipeline
    sums: gl.shared_memory_descriptor


@gluon.jit
def new_memory(tensors, QK_STAGES: gl.constexpr, STAGES: gl.constexpr, WALK: gl.constexpr):
    """Allocate it."""
    scheduler = new_scheduler(2, False)
    qk = new_operands(tensors.q, tensors.k, QK_STAGES)
    gradients = new_operands(tensors.dout, tensors.v, STAGES)
    pairs = qk.rows
    if tensors.pairs.ARGUMENT is not None:
        pairs = Pipeline(new_buffers(tensors.pairs.desc, 2), new_barriers(1, 1), new_barriers(1, 2), 1)
    sums = qk.keys
    if WALK is None:
        sums = new_buffers(tensors.target, 2)
    return SharedMemory(scheduler, qk, gradients, pairs, sums)


@struct
class PairMap:
    """The tiles of the gradient, and the batch entries and heads that share each: ``shared_heads`` is 1 or all.

    seq: rows and keys, with limits. WALK: None for what has an element for each pair; else "row", "column" or
    "distance", and a CTA adds up all tiles of the same rows, of the same keys, or of a band from the upper left to the
    lower right, in which an element has the same column - row in all of them. Tiles are square then.
    """

    seq: TileMap
    matrices: gl.tensor
    heads_per_kv: gl.tensor
    shared_batches: gl.tensor
    shared_heads: gl.tensor
    WALK: gl.constexpr

    @gluon.jit
    def tiles(self):
        """The tiles of a matrix along its rows, and along its keys."""
        return self.seq.tiles_per_head(), gl.cdiv(self.seq.inner_len, self.seq.INNER_TILE)

    @gluon.jit
    def num_tiles(self):
        """The tiles of all matrices, or as many as CTAs begin a walk at."""
        of_rows, of_keys = self.tiles()
        count = self.matrices * of_rows * of_keys
        if self.WALK == "row":
            count = self.matrices * of_rows
        elif self.WALK == "column":
            count = self.matrices * of_keys
        elif self.WALK == "distance":
            count = self.matrices * (of_rows + of_keys - 1)
        return count

    @gluon.jit
    def place(self, index):
        """The matrix of a tile's index, and its first row and key; of a walk's index, those of its first tile."""
        of_rows, of_keys = self.tiles()
        if self.WALK is None:
            row_tile = index // of_keys
            matrix = row_tile // of_rows
            row_tile = row_tile % of_rows
            key_tile = index % of_keys
        else:
            # The longest walks come first: the others fill the gaps at the end.
            order = index // self.matrices
            matrix = index % self.matrices
            if self.WALK == "row":
                row_tile = of_rows - 1 - order
                key_tile, _ = self.keys_of(row_tile * self.seq.OUTER_TILE)
            elif self.WALK == "column":
                key_tile = order
                row_tile, _ = self.rows_of(key_tile * self.seq.INNER_TILE)
            else:
                # From the middle on.
                aside = gl.where(order % 2 == 1, -((order + 1) // 2), order // 2)
                ahead = (of_rows + of_keys - 1) // 2 + aside - (of_rows - 1)
                row_tile = gl.maximum(-ahead, 0)
                key_tile = gl.maximum(ahead, 0)
        return matrix, row_tile * self.seq.OUTER_TILE, key_tile * self.seq.INNER_TILE

    @gluon.jit
    def keys_of(self, row):
        """The first tile of keys that any row of a tile sees, and the one after the last: at least one."""
        tile = self.seq.tile(row, row, row)
        return tile.begin, tile.end

    @gluon.jit
    def rows_of(self, column):
        """The first tile of rows of which any sees a key of a tile, and the one after the last."""
        begin = column * 0
        end, _ = self.tiles()
        if self.seq.RIGHT:
            begin = gl.maximum(column - self.seq.right, 0) // self.seq.OUTER_TILE
        if self.seq.LEFT:
            after = gl.maximum(column + self.seq.INNER_TILE - self.seq.left, 0)
            end = gl.minimum(end, gl.cdiv(after, self.seq.OUTER_TILE))
        return begin, end

    @gluon.jit
    def entries(self, matrix, row, column):
        """The first batch entry and head that share a tile, and how many do: none if its limits hide it."""
        count = self.shared_batches * self.shared_heads
        if self.seq.RIGHT:
            count = gl.where(column > row + self.seq.OUTER_TILE - 1 + self.seq.right, 0, count)
        if self.seq.LEFT:
            count = gl.where(column + self.seq.INNER_TILE - 1 < row + self.seq.left, 0, count)
        groups = self.seq.heads // self.shared_heads
        return matrix // groups, matrix % groups, count

    @gluon.jit
    def entry(self, first_batch, first_head, number):
        """The batch entry and head of that number."""
        number = gl.to_tensor(number)
        return first_batch + number // self.shared_heads, first_head + number % self.shared_heads

    @gluon.jit
    def length(self, row, column):
        """The tiles of the walk that begins with this tile, or 1; none if limits hide them all."""
        length = 1
        if self.WALK == "row":
            begin, end = self.keys_of(row)
            length = end - begin
        elif self.WALK == "column":
            begin, end = self.rows_of(column)
            length = gl.maximum(end - begin, 0)
        elif self.WALK == "distance":
            of_rows, of_keys = self.tiles()
            length = gl.minimum(of_rows - row // self.seq.OUTER_TILE, of_keys - column // self.seq.INNER_TILE)
        return length

    @gluon.jit
    def step(self, row, column, number):
        """The first row and key of a walk's tile of this number."""
        if self.WALK == "row" or self.WALK == "distance":
            column += number * self.seq.INNER_TILE
        if self.WALK == "column" or self.WALK == "distance":
            row += number * self.seq.OUTER_TILE
        return row, column


@gluon.jit
def producer(tensors, memory, pair_map):
    """The producer warp: claims tiles, and loads what the products and rules read of each entry and head."""
    ROWS: gl.constexpr = pair_map.seq.OUTER_TILE
    PAIRS: gl.constexpr = tensors.pairs.ARGUMENT is not None
    BYTES: gl.constexpr = pair_bytes(tensors.pairs.ARGUMENT, tensors.pairs.desc.dtype, ROWS, pair_map.seq.INNER_TILE)
    num_tiles = pair_map.num_tiles()
    n = 0
    turn = 0
    of_pairs = 0
    index = gl.program_id(0)
    while index < num_tiles:
        # Consumers find everything from the tile's index, which takes the place of a first row.
        memory.scheduler.push(turn, COMPUTE, pair_map.seq.tile(turn, turn, index), pair_map.seq)
        matrix, first_row, first_column = pair_map.place(index)
        first_batch, first_head, count = pair_map.entries(matrix, first_row, first_column)
        length = pair_map.length(first_row, first_column)
        for number in range(count):
            batch, head = pair_map.entry(first_batch, first_head, number)
            kv_head = head // pair_map.heads_per_kv
            for along in range(length):
                row, column = pair_map.step(first_row, first_column, along)
                memory.qk.load(tensors.q, tensors.k, batch, head, kv_head, row, column, n)
                if PAIRS:  # noqa: SIM102 - known when compiled
                    if (number == 0) | (not tensors.SAME_PAIRS):
                        memory.pairs.wait_empty(of_pairs)
                        full = memory.pairs.full_barrier(of_pairs)
                        mbarrier.expect(full, BYTES)
                        for group in gl.static_range(2):
                            tile = memory.pairs.buffers.index(group)
                            tensors.pairs.load(batch, head, row + group * WG_ROWS, column, full, tile)
                        of_pairs += 1
                memory.gradients.load(tensors.dout, tensors.v, batch, head, kv_head, row, column, n)
                n += 1
        turn += 1
        index = claim_tile(tensors.workspace, num_tiles, False)
    memory.scheduler.push(turn, STOP, pair_map.seq.tile(turn, turn, turn), pair_map.seq)
