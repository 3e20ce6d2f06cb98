"""From the index of a tile to its rows, and to the inner tiles that it visits.

Tiles of the outer axis belong to CTAs, which loop over tiles of the inner axis. The forward's outer axis is q and its
inner one k; the backward's are k and q.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .block_lists import BLOCK_SIZE, BlockLists
from .named_barriers import WARP
from .struct import struct
from .varlen import Varlen, tma_coords

LONG = gl.constexpr(32768)
"""Rows from which on a section has few heads, and a tile takes long."""


@struct
class Tile:
    """A tile of outer rows, from ``start`` on, and the inner tiles [begin, end) of which any of its rows sees a part.

    Every row sees all of the inner tiles [whole_begin, whole_end), and a part of one after them unless it sees nothing.
    With lists of blocks these are places in the list, from its end to its beginning unless FROM_FIRST (`TileMap`), and
    ``entry`` is where it begins; the ``skipped`` ones after the first are hidden.
    """

    batch_head: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    start: gl.tensor
    begin: gl.tensor
    whole_begin: gl.tensor
    whole_end: gl.tensor
    end: gl.tensor
    entry: gl.tensor
    skipped: gl.tensor


@struct
class TileMap:
    """The tiles of a launch in the order in which CTAs claim them.

    Heads come in sections whose inner tensors fit into the L2 cache. A section's longest tiles come first, with
    LAST_FIRST the last ones, and the short ones fill the gaps at its end. With lists of blocks, and with fewer packed
    sequences than a warp has threads, the last two sections are one, whose tiles are in the order that
    `BlockLists.longest` or `Varlen.longest_first` says; with lists of LONG rows the last three. With BATCH_INNER the
    entries of a batch follow each other, head by head: what they share of a tensor of pairs then comes from the L2
    cache.

    Outer row i sees the inner rows from i + left (if LEFT) to i + right (if RIGHT). With packed sequences, lengths are
    those of the tensors and limits those of equally long sequences; `tile_at` also returns the tile map of the tile's
    sequence, in which both are the sequence's.

    With lists of blocks inner tiles are those of the lists; with MASKED, where a mask has none, any pair may be hidden.
    INNER_DIVISIBLE: all rows of inner tiles exist. FROM_FIRST: inner tiles are visited from ``begin`` on, not from
    ``end`` - 1 down; listed ones in the order of their list.
    """

    batch_heads: gl.tensor
    heads: gl.tensor
    outer_len: gl.tensor
    inner_len: gl.tensor
    left: gl.tensor
    right: gl.tensor
    section: gl.tensor
    varlen: Varlen
    blocks: BlockLists
    OUTER_TILE: gl.constexpr
    INNER_TILE: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    MASKED: gl.constexpr
    BATCH_INNER: gl.constexpr
    INNER_DIVISIBLE: gl.constexpr
    LAST_FIRST: gl.constexpr
    FROM_FIRST: gl.constexpr

    @gluon.jit
    def tiles_per_head(self):
        """Tiles of a head. With packed sequences: enough for any lengths, so some may be empty."""
        if self.varlen.VARLEN:
            tiles = self.outer_len // self.OUTER_TILE + self.varlen.num_sequences + 1
        else:
            tiles = gl.cdiv(self.outer_len, self.OUTER_TILE)
        return tiles

    @gluon.jit
    def num_tiles(self):
        """Tiles of the launch."""
        return self.batch_heads * self.tiles_per_head()

    @gluon.jit
    def tile_at(self, index):
        """The tile of an index, and the tile map of its sequence."""
        tiles = self.tiles_per_head()
        # The last section takes the remaining heads too: alone they would have tiles for few CTAs.
        last = self.batch_heads // self.section - 1
        BY_LIST: gl.constexpr = self.blocks.LISTED and not self.varlen.VARLEN
        if BY_LIST:
            last = gl.maximum(last - 1 - (self.outer_len >= LONG).to(gl.int32), 0)
        elif self.varlen.VARLEN:
            last = gl.maximum(last - 1, 0)
        section = gl.minimum(index // (self.section * tiles), last)
        first = section * self.section
        within = index - first * tiles
        width = self.section
        if section == last:
            width = self.batch_heads - first
        outer_tile = within // width
        batch_head = first + within % width
        place = outer_tile
        if self.LAST_FIRST:
            outer_tile = tiles - 1 - outer_tile
        seq = self
        if self.varlen.VARLEN:
            if (section == last) & (self.varlen.num_sequences < WARP):
                outer_tile = self.varlen.longest_first(place, tiles, self.OUTER_TILE, self.LAST_FIRST)
            varlen, outer_tile, outer_len, inner_len = self.varlen.locate(
                outer_tile, self.outer_len, self.inner_len, self.OUTER_TILE
            )
            seq = self.for_sequence(varlen, outer_len, inner_len)
        batch, head = batch_head // self.heads, batch_head % self.heads
        if self.BATCH_INNER:
            entries = self.batch_heads // self.heads
            batch, head = batch_head % entries, batch_head // entries
        if BY_LIST:
            TILES: gl.constexpr = BLOCK_SIZE // self.OUTER_TILE
            if (section == last) & (tiles % TILES == 0):
                # In the backward heads are those of k, and the lists perhaps another head's: any order has all tiles.
                outer_tile = self.blocks.longest(batch, head, place // TILES) * TILES + outer_tile % TILES
        return seq.tile(batch, head, outer_tile * self.OUTER_TILE), seq

    @gluon.jit
    def for_sequence(self, varlen, outer_len, inner_len):
        """The tile map of one packed sequence."""
        shift = outer_len * 0
        if self.varlen.BOTTOM_RIGHT:
            shift = inner_len - outer_len
        return TileMap(
            self.batch_heads, self.heads, outer_len, inner_len, self.left + shift, self.right + shift, self.section,
            varlen, self.blocks, self.OUTER_TILE, self.INNER_TILE, self.LEFT, self.RIGHT, self.MASKED,
            self.BATCH_INNER, self.INNER_DIVISIBLE, self.LAST_FIRST, self.FROM_FIRST,
        )  # fmt: skip

    @gluon.jit
    def has_rows(self, tile):
        """Whether one of these tiles has rows. There are enough for packed sequences of any lengths: some have none."""
        if self.varlen.VARLEN:
            exists = tile.start < self.outer_len
        else:
            exists = True
        return exists

    @gluon.jit
    def outer_coords(self, batch, head, row, column):
        """TMA coordinates of outer rows. Rows that do not exist read as zeros and are not written."""
        return tma_coords(batch, head, self.varlen.outer_start, self.outer_len, row, column, self.varlen.VARLEN)

    @gluon.jit
    def inner_coords(self, batch, head, row, column):
        """The same of inner rows."""
        return tma_coords(batch, head, self.varlen.inner_start, self.inner_len, row, column, self.varlen.VARLEN)

    @gluon.jit
    def padded_inner_start(self):
        """The first inner row in per-row buffers, which are padded for each sequence."""
        start = 0
        if self.varlen.VARLEN:
            start = self.varlen.padded_inner_start()
        return start

    @gluon.jit
    def heads_to_visit(self, heads):
        """``heads``, or 0 for a packed sequence without inner rows, which a backward need not visit."""
        if self.varlen.VARLEN:
            heads = gl.where(self.inner_len > 0, heads, 0)
        return heads

    @gluon.jit
    def per_row(self, pointer, tile, seq):
        """The address of the first outer row's number in a buffer (batch_heads, outer_len), for a tile's sequence."""
        pointer += tile.batch_head.to(gl.int64) * self.outer_len
        if self.varlen.VARLEN:
            pointer += seq.varlen.outer_start
        return pointer

    @gluon.jit
    def tile(self, batch, head, start):
        """The tile of a head that begins at an outer row, with the inner tiles that its limits leave; see `listed`."""
        end = self.inner_len
        last = self.inner_len - 1
        if self.RIGHT:
            end = gl.minimum(end, start + self.OUTER_TILE + self.right)
            last = gl.minimum(last, start + self.right)
        begin = 0
        whole_begin = 0
        if self.LEFT:
            begin = gl.maximum(start + self.left, 0)
            whole_begin = gl.maximum(start + self.OUTER_TILE - 1 + self.left, 0)
        # At least one inner tile is visited, if need be wholly masked, so that every tile has a softmax.
        end = gl.maximum(gl.cdiv(end, self.INNER_TILE), 1)
        begin = gl.minimum(begin // self.INNER_TILE, end - 1)
        whole_end = gl.maximum(last, 0) // self.INNER_TILE
        whole_begin = gl.cdiv(whole_begin, self.INNER_TILE)
        if self.MASKED:
            whole_end *= 0
        if self.blocks.LISTED:
            begin = 0
            whole_begin = 0
        return Tile(
            batch * self.heads + head, batch, head, start,
            gl.to_tensor(begin), gl.to_tensor(whole_begin), whole_end, end, self.blocks.lists, end * 0,
        )  # fmt: skip

    @gluon.jit
    def listed(self, tile, head):
        """A tile with the inner tiles that are listed for a head, if any are listed."""
        if self.blocks.LISTED:
            start = tile.start
            if self.varlen.VARLEN:
                start = self.nearest_outer(start)
            entry = self.blocks.entry(self.batch_of(tile), head, start)
            whole_end, end = self.blocks.count(entry, self.INNER_TILE)
            if self.varlen.VARLEN:
                # Without inner rows one tile is visited, and masked.
                whole_end = gl.where(self.inner_len > 0, whole_end, 0)
                end = gl.where(self.inner_len > 0, end, 1)
            skipped = tile.skipped
            if self.RIGHT and self.OUTER_TILE == BLOCK_SIZE // 2:
                last = tile.start + self.OUTER_TILE - 1 + self.right
                skipped = self.blocks.hidden(entry, tile.start, last, end, self.INNER_TILE)
            end -= skipped
            whole_begin = tile.whole_begin
            if self.FROM_FIRST:
                whole_begin = end - whole_end
                whole_end = end
            tile = Tile(
                tile.batch_head, tile.batch, tile.head, tile.start,
                tile.begin, whole_begin, whole_end, end, entry, skipped,
            )  # fmt: skip
        return tile

    @gluon.jit
    def for_member(self, tile, member, heads):
        """The same for one of the ``heads`` query heads that share a backward's tile of keys."""
        return self.listed(tile, tile.head * heads + member)

    @gluon.jit
    def visited(self, inner_tile, tile):
        """The inner tile at a place between a tile's ``begin`` and ``end``."""
        if self.blocks.LISTED:
            position = inner_tile
            if not self.FROM_FIRST:
                position = tile.end - 1 - inner_tile
            position += gl.where(position > 0, tile.skipped, 0)
            inner_tile = self.blocks.inner_tile(tile.entry, position, tile.start, self.INNER_TILE)
            if self.varlen.VARLEN:
                # Lists may be for other sequences. Per-row buffers have rows to the end of a sequence's last block.
                STEPS: gl.constexpr = BLOCK_SIZE // self.INNER_TILE
                last_block = gl.maximum(self.inner_len - 1, 0) // BLOCK_SIZE
                inner_tile = gl.minimum(inner_tile, last_block * STEPS + STEPS - 1)
        return inner_tile

    @gluon.jit
    def batch_of(self, tile):
        """What rules take for the batch entry: of packed sequences the sequence, the last one for rows after it."""
        batch = tile.batch
        if self.varlen.VARLEN:
            batch = gl.minimum(self.varlen.index, self.varlen.num_sequences - 1)
        return batch

    @gluon.jit
    def nearest_outer(self, rows):
        """The nearest outer rows that exist, and that captured tensors and lists of blocks have elements for."""
        return self.varlen.nearest(rows, self.outer_len, self.varlen.max_outer)

    @gluon.jit
    def nearest_inner(self, rows):
        """The nearest inner rows that exist, and that captured tensors have elements for."""
        return self.varlen.nearest(rows, self.inner_len, self.varlen.max_inner)

    @gluon.jit
    def reaches(self, outer_tile, inner_tile, tile):
        """Whether a head has a tile number ``outer_tile``, and it begins at ``inner_tile`` or before."""
        exists = outer_tile < gl.cdiv(self.outer_len, self.OUTER_TILE)
        return exists & (self.tile(tile.batch, tile.head, outer_tile * self.OUTER_TILE).begin <= inner_tile)

    @gluon.jit
    def ends_partially(self, tile):
        """Whether the last inner tile has rows that do not exist, such as all of a sequence without inner rows."""
        if self.varlen.VARLEN:
            partial = tile.end * self.INNER_TILE > self.inner_len
        else:
            partial = self.inner_len % self.INNER_TILE != 0
        return partial
