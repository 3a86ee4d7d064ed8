import json

import numpy as np
import pandas as pd
import pytest
import torch

from fedmoe.data.raw_table import as_raw_table
from fedmoe.data.tables import TableSchema, find_schema
from fedmoe.errors import DataError

CSV = """hospital,age,sex,ward,diagnosis
north,61,f,7,flu
north,35.5,m,12,cold
south,50,f,7,flu
"""


def written(tmp_path, text, name="patients.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def schema_of(table, shared=None, **settings):
    raw = as_raw_table(table)
    mask = np.ones(len(raw), dtype=bool) if shared is None else np.array(shared)
    return find_schema(raw, mask, client="hospital", label="diagnosis", **settings)


class TestReading:
    def test_a_csv_file_a_frame_and_rows_mean_the_same(self, tmp_path):
        path = written(tmp_path, CSV)
        frame = pd.read_csv(path)
        rows = frame.to_dict("records")
        columns = {name: frame[name].tolist() for name in frame}
        schemas = [schema_of(given) for given in (path, str(path), frame, rows, columns)]
        assert all(schema == schemas[0] for schema in schemas)
        for given in (frame, rows, columns):
            assert torch.equal(schemas[0].encode(given), schemas[0].encode(path))

    def test_parquet_is_read(self, tmp_path):
        frame = pd.read_csv(written(tmp_path, CSV))
        frame.to_parquet(tmp_path / "patients.parquet")
        assert torch.equal(schema_of(frame).encode(tmp_path / "patients.parquet"), schema_of(frame).encode(frame))

    def test_parquet_without_pandas_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(DataError, match=r"pip install 'fedmoe\[table\]'"):
            as_raw_table(written(tmp_path, "", "patients.parquet"))

    def test_csv_needs_no_pandas(self, tmp_path, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "pandas", None)
        assert schema_of(written(tmp_path, CSV)).classes == ("cold", "flu")

    @pytest.mark.parametrize(("separator", "name"), [(";", "a.csv"), ("\t", "a.tsv")])
    def test_other_separators_and_a_byte_order_mark_are_understood(self, tmp_path, separator, name):
        path = written(tmp_path, "\ufeff" + CSV.replace(",", separator), name)
        assert schema_of(path) == schema_of(written(tmp_path, CSV))

    def test_quoted_cells_may_hold_separators_and_new_lines(self, tmp_path):
        raw = as_raw_table(written(tmp_path, 'hospital,note,diagnosis\nnorth,"a, b\nc",flu\nsouth,d,\n'))
        assert raw.columns["note"].tolist() == ["a, b\nc", "d"]
        assert raw.place(1).endswith("line 4")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "no header"),
            ("a,b\n", "no rows"),
            ("a,,c\n1,2,3\n", "column 2 of the header has no name"),
            ("a,b,a\n1,2,3\n", "two columns 'a'"),
            ("a,b\n1,2\n1,2,3\n", "line 3: 3 cells, but the header names 2 columns"),
            ('a,b\n1,"2\n', "not sound CSV"),
        ],
    )
    def test_a_broken_file_is_refused_with_its_line(self, tmp_path, text, words):
        with pytest.raises(DataError, match=words):
            as_raw_table(written(tmp_path, text))

    def test_what_is_no_table_is_refused(self, tmp_path):
        (tmp_path / "a.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
        for given, words in [
            (tmp_path / "a.csv", "not UTF-8"),
            (tmp_path / "none.csv", "Name an existing file"),
            (tmp_path / "a.xlsx", "no table that can be read"),
            (3, "a int is no table"),
            ({"a": [1, 2], "b": [1]}, "one cell per row"),
            ([], "no rows"),
        ]:
            with pytest.raises(DataError, match=words):
                as_raw_table(given)


class TestEncoding:
    def test_numbers_stay_and_categories_are_one_input_each(self, tmp_path):
        schema = schema_of(written(tmp_path, CSV))
        assert schema.input_names == ("age", "sex=f", "sex=m", "ward")
        x = schema.encode(tmp_path / "patients.csv")
        assert x.dtype == torch.float32
        assert x.tolist() == [[61, 1, 0, 7], [35.5, 0, 1, 12], [50, 1, 0, 7]]
        assert schema.labels(tmp_path / "patients.csv").tolist() == [1, 0, 1]

    def test_numbers_can_be_declared_categories(self, tmp_path):
        path = written(tmp_path, CSV)
        assert schema_of(path, categories=["ward"]).input_names[-2:] == ("ward=7", "ward=12")
        declared = schema_of(path, categories={"ward": [12, 7, 9]})
        assert declared.encode({"age": 1, "sex": "m", "ward": 9.0}).tolist() == [[1, 0, 1, 0, 0, 1]]

    def test_features_and_ignored_columns_are_chosen_by_name(self, tmp_path):
        path = written(tmp_path, CSV)
        assert schema_of(path, features=["age"]).input_names == ("age",)
        assert schema_of(path, ignore=["sex", "ward"]).input_names == ("age",)
        with pytest.raises(DataError, match=r"no column 'agee' \(named in ignore\)"):
            schema_of(path, ignore=["agee"])

    def test_standardised_numbers_have_mean_0_and_deviation_1_over_shared_rows(self):
        table = {"hospital": list("aaaa"), "age": [1, 2, 3, 100], "diagnosis": list("xyxy")}
        x = schema_of(table, [True, True, True, False], standardize=True).encode(table)[:, 0]
        assert x[:3].mean().abs() < 1e-6 and abs(x[:3].std(correction=0) - 1) < 1e-6

    def test_a_schema_survives_json(self, tmp_path):
        schema = schema_of(written(tmp_path, CSV), standardize=True)
        again = TableSchema.from_dict(json.loads(json.dumps(schema.to_dict())))
        assert again == schema
        with pytest.raises(DataError, match="no stored table schema"):
            TableSchema.from_dict({"features": [{}]})

    def test_truth_values_and_nullable_integers_of_a_frame_are_understood(self):
        frame = pd.DataFrame(
            {
                "hospital": ["a", "b"],
                "smokes": [True, False],
                "age": pd.array([3, 4], dtype="Int64"),
                "blood": pd.Categorical(["A", "0"]),
                "diagnosis": [1.0, 2.0],
            }
        )
        schema = schema_of(frame)
        assert schema.input_names == ("smokes=False", "smokes=True", "age", "blood=0", "blood=A")
        assert schema.classes == ("1", "2")
        assert schema.encode(frame).tolist() == [[0, 1, 3, 0, 1], [1, 0, 4, 1, 0]]


class TestRefusals:
    @pytest.mark.parametrize("missing", ["", "NA", "nan"])
    def test_a_missing_number_is_refused_by_line_and_column(self, tmp_path, missing):
        path = written(tmp_path, CSV.replace("35.5", missing))
        with pytest.raises(DataError, match=r"line 3, column 'age': the value is missing"):
            schema_of(path).encode(path)

    @pytest.mark.parametrize(("column", "row"), [("age", 1), ("sex", 2), ("blood", 0)])
    def test_a_missing_cell_of_a_frame_is_refused_by_row_and_column(self, column, row):
        frame = pd.DataFrame({"age": pd.array([3, 4, 5], dtype="Int64"), "sex": ["f", "m", "f"], "blood": [1.0, 2, 3]})
        frame = frame.assign(hospital="a", diagnosis="x")
        schema = schema_of(frame)
        frame.loc[row, column] = None
        with pytest.raises(DataError, match=f"the frame, row {row}, column '{column}': the value is missing"):
            schema.encode(frame)

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ("35.5", ">90", r"line 3, column 'age': '>90' is no number, but other rows have numbers"),
            ("35.5", "inf", r"line 3, column 'age': 'inf' is no"),
            ("35.5", "1e300", r"line 3, column 'age': '1e300' is no finite number"),
            (",flu", ",1.5", r"line 2, column 'diagnosis': the label '1.5' is no class"),
            (",flu", ",", r"line 2, column 'diagnosis': the value is missing"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_with_its_place(self, tmp_path, old, new, words):
        path = written(tmp_path, CSV.replace(old, new))
        with pytest.raises(DataError, match=words):
            schema = schema_of(path)
            schema.encode(path), schema.labels(path)

    def test_a_decimal_comma_is_named(self, tmp_path):
        path = written(tmp_path, "hospital;dose;diagnosis\na;1,5;x\nb;2,5;y\n")
        with pytest.raises(DataError, match=r"'1,5' has a decimal comma"):
            schema_of(path)

    def test_a_column_of_names_is_refused(self):
        table = {"hospital": ["a"] * 300, "name": [f"p{n}" for n in range(300)], "diagnosis": ["x"] * 300}
        with pytest.raises(DataError, match=r"'name' has 300 categories.*ignore=\['name'\]"):
            schema_of(table)
        assert schema_of({**table, "age": range(300)}, ignore=["name"]).num_inputs == 1

    def test_only_shared_rows_make_categories_kinds_and_classes(self, tmp_path):
        path = written(tmp_path, CSV)
        shared = [True, False, True]
        schema = schema_of(path, shared)
        assert schema.input_names == ("age", "sex=f", "ward") and schema.classes == ("flu",)
        with pytest.raises(
            DataError, match=r"line 3, column 'sex': the category 'm' is not known.*Declare.*categories"
        ):
            schema.encode(path)
        with pytest.raises(DataError, match=r"line 3, column 'diagnosis': the label 'cold' is not known.*classes"):
            schema.labels(path)
        declared = schema_of(path, shared, categories={"sex": ["f", "m"]}, classes=["flu", "cold"])
        assert declared.encode(path)[1].tolist() == [35.5, 0, 1, 12]
        assert declared.labels(path).tolist() == [0, 1, 0]

    def test_a_word_in_a_private_row_does_not_turn_numbers_into_categories(self, tmp_path):
        path = written(tmp_path, CSV.replace("35.5", "old"))
        schema = schema_of(path, [True, False, True])
        assert schema.features[0].kind == "number"
        with pytest.raises(DataError, match="line 3, column 'age': 'old' is no finite number"):
            schema.encode(path)
