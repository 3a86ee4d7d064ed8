import numpy as np
import pytest
import torch

from fedmoe.data.raw_table import as_raw_table
from fedmoe.data.rows import RowReader
from fedmoe.data.tables import find_schema
from fedmoe.errors import DataError

ROWS = [{"who": "a", "age": n, "sex": "fm"[n % 2], "ill": "yes" if n > 2 else "no"} for n in range(6)]
TABLE = as_raw_table(ROWS)
SCHEMA = find_schema(TABLE, np.ones(6, dtype=bool), client="who", label="ill")
OF_TABLE = RowReader((3,), torch.float32, SCHEMA)
NUMBERS = RowReader((2, 2), torch.float32)
WORDS = RowReader((3,), torch.int64)


class TestFiles:
    def test_a_table_is_read_by_its_schema(self, tmp_path):
        (tmp_path / "new.csv").write_text("sex,age,note\nm,3,x\nf,40,\n")
        assert OF_TABLE.file(tmp_path / "new.csv").tolist() == [[3, 0, 1], [40, 1, 0]]

    def test_without_a_schema_columns_are_the_inputs_in_their_order(self, tmp_path):
        (tmp_path / "new.csv").write_text("a,b,c,d\n1,2,3,4\n5,6,7,8.5\n")
        assert NUMBERS.file(tmp_path / "new.csv").tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8.5]]]

    def test_arrays(self, tmp_path):
        np.savez(tmp_path / "new.npz", x=np.arange(8).reshape(2, 2, 2), y=np.zeros(2))
        found = NUMBERS.file(tmp_path / "new.npz")
        assert found.dtype == torch.float32 and found.flatten().tolist() == list(range(8))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b,c\n1,2,3\n", r"has 3 columns, but the model reads 4 numbers \(shape \(2, 2\)\)"),
            ("a,b,c,d\n1,2,3,x\n", "line 2, column 'd': this is no finite number"),
            ("a,b,c,d\n1,2,,3\n", "line 2, column 'c'"),
        ],
    )
    def test_a_table_that_does_not_fit(self, tmp_path, text, message):
        (tmp_path / "new.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            NUMBERS.file(tmp_path / "new.csv")

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"z": np.zeros(3)}, "holds z, not x"),
            ({"x": np.zeros((3, 2))}, r"x has shape \(3, 2\), but the model reads \(N, 2, 2\)"),
            ({"x": np.zeros((0, 2, 2))}, "N rows of at least 1"),
            ({"x": np.full((1, 2, 2), np.nan)}, "row 0: x holds NaN"),
            ({"x": np.full((1, 2, 2), 1e300)}, "row 0: x holds NaN or infinity"),
        ],
    )
    def test_arrays_that_do_not_fit(self, tmp_path, arrays, message):
        np.savez(tmp_path / "new.npz", **arrays)
        with pytest.raises(DataError, match=message):
            NUMBERS.file(tmp_path / "new.npz")


class TestValues:
    def test_dicts_are_read_by_the_schema(self):
        assert OF_TABLE.values([{"age": 3, "sex": "m"}]).tolist() == [[3, 0, 1]]

    def test_lists_are_x_itself(self):
        assert OF_TABLE.values([[3, 0, 1]]).tolist() == [[3, 0, 1]]
        assert WORDS.values([[1, 2, 3]]).dtype == torch.int64

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([], "no list of at least one row"),
            ("rows", "no list of at least one row"),
            ({"age": 3}, "no list of at least one row"),
            ([[1, 2, 3], [1, 2]], "different lengths"),
            ([[1, "x", 3]], "something else than numbers"),
            ([[1, None, 3]], "something else than numbers"),
            ([[1, 2]], r"x has shape \(1, 2\)"),
            ([3], r"x has shape \(1,\)"),
            ([[1.5, 2, 3]], "whole numbers"),
            ([[1, 2, 10**30]], "something else than numbers"),
        ],
    )
    def test_what_is_no_row_is_explained(self, rows, message):
        with pytest.raises(DataError, match=message):
            WORDS.values(rows)

    def test_an_unknown_category_is_explained(self):
        with pytest.raises(DataError, match="the category 'x' is not known"):
            OF_TABLE.values([{"age": 3, "sex": "x"}])


def test_texts_of_different_lengths_are_padded_at_the_end():
    texts = RowReader((3,), torch.int64, reads_texts=True)
    assert texts.values([[4, 2], [], [1, 2, 3]]).tolist() == [[4, 2, 0], [0, 0, 0], [1, 2, 3]]
    with pytest.raises(DataError, match=r"row 1 has 4 words, but the model reads 3\. Cut it"):
        texts.values([[1], [1, 2, 3, 4]])
    with pytest.raises(DataError, match=r"something else than numbers|different lengths"):
        texts.values([["a", "b"], [1]])
    with pytest.raises(DataError):
        texts.values([[1, 2], 3])
