"""If this fails, rows of other ranks are read from, or added to, the wrong place. Rows by number,
read and added to, against PyTorch's indexing: equal bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringfa3.planning.row_exchange import RowIndex

CPU = torch.device("cpu")
ROWS = [[], [3], [0, 1, 2, 3, 4], [2, 3, 4], [0, 2], [4, 3], [0, 1, 3]]


@pytest.mark.parametrize("own", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("d", [2, 64])
def test_rows_are_those_of_an_index(own: list[int], dtype: torch.dtype, d: int) -> None:
    rows = RowIndex.of(np.array(own, np.int64), CPU)
    assert rows.consecutive == (not own or own == [*range(own[0], own[-1] + 1)])
    fused = torch.randn(5, 3, 2, d).to(dtype)
    for x in (fused[:, 1], fused[:, 1].contiguous()):
        for begin, end in ((0, len(own)), (1, len(own))):
            part, index = rows.part(begin, end), torch.tensor(own[begin:end], dtype=torch.int64)
            buffer = torch.full((len(index), 2, 2, d), torch.nan, dtype=dtype)
            part.gather(x, buffer[:, 1])
            assert torch.equal(buffer[:, 1], x[index])
            assert buffer[:, 0].isnan().all()
            home = torch.randn(5, 2, 2, d).to(dtype)
            expected = home.index_add(0, index, buffer.nan_to_num())
            part.add(buffer.nan_to_num(), home)
            assert torch.equal(home, expected)
