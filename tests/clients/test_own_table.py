import json

import numpy as np
import pandas as pd
import pytest
import torch

import fedmoe
from fedmoe.clients.own_table import federation_from_table
from fedmoe.config import parse_config, read_config
from fedmoe.data.tables import TableSchema
from fedmoe.errors import ConfigError, DataError
from fedmoe.federations import build_federation


def patients(size=60):
    number = np.arange(size)
    return pd.DataFrame(
        {
            "hospital": np.array(["north", "south", "coast"])[number % 3],
            "age": number,
            "sex": np.array(["f", "m"])[number // 3 % 2],
            "consent": np.where(number % 5 == 0, "no", "yes"),
            "diagnosis": np.where(number >= size // 2, "flu", "cold"),
        }
    )


def table_federation(frame, **settings):
    return federation_from_table(frame, client="hospital", label="diagnosis", **{"ignore": ["consent"], **settings})


def ages(part):
    return sorted(part.x[:, 0].long().tolist())


def test_each_value_of_the_client_column_is_a_client_with_its_rows():
    federation = table_federation(patients())
    assert federation.names == ["north", "south", "coast"]
    assert federation.class_names == ("cold", "flu") and federation.num_classes == 2
    assert federation.input_shape == (3,)
    for client in range(3):
        records = federation.load(client)
        held = ages(records.train) + ages(records.validation) + ages(records.test)
        assert sorted(held) == list(range(client, 60, 3))
        assert torch.equal(records.train.y, (records.train.x[:, 0] >= 30).long())


def test_clients_opt_out_by_name_and_rows_by_a_column_or_a_mask():
    by_name = table_federation(patients(), opted_out=["coast"])
    assert [by_name.names[client] for client in by_name.participants] == ["north", "south"]
    frame = patients().assign(refused=lambda frame: frame.consent == "no")
    by_column = table_federation(frame, opted_out="refused")
    assert "refused" not in str(by_column.table.input_names)
    by_mask = table_federation(
        patients(),
        opted_out={
            name: (patients().query("hospital == @name").consent == "no").to_numpy()
            for name in ("north", "south", "coast")
        },
    )
    assert by_column.digest == by_mask.digest != table_federation(patients()).digest
    records = by_column.load(0)
    assert torch.equal(records.train_opted_in, records.train.x[:, 0] % 5 != 0)


def test_what_only_private_rows_show_is_refused_until_it_is_declared():
    frame = patients()
    frame.loc[frame.hospital == "coast", "sex"] = "x"
    with pytest.raises(DataError, match="row 2, column 'sex': the category 'x' is not known"):
        table_federation(frame, opted_out=["coast"])
    with pytest.raises(DataError, match="the category 'x' is not known"):
        table_federation(frame, unseen=["coast"])
    declared = table_federation(frame, opted_out=["coast"], categories={"sex": ["f", "m", "x"]})
    assert declared.table.input_names == ("age", "sex=f", "sex=m", "sex=x")


def test_opted_out_rows_change_no_byte_of_the_schema():
    frame = patients()
    before = table_federation(frame, opted_out=["coast"], standardize=True).table
    frame.loc[frame.hospital == "coast", "age"] *= 100
    assert table_federation(frame, opted_out=["coast"], standardize=True).table == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"opted_out": "coast"}, r"'coast' is a client, not a column.*opted_out=\['coast'\]"),
        ({"opted_out": "sex"}, "'f' does not say whether the row is opted out"),
        ({"opted_out": ["cost"]}, "Did you mean 'coast'"),
        ({"opted_out": ["north", "south", "coast"]}, "no row that may be shared"),
        ({"unseen": ["cost"]}, "Did you mean 'coast'"),
        ({"client": "clinic"}, r"no column 'clinic' \(client=\)"),
        ({"label": "illness"}, r"no column 'illness' \(label=\)"),
    ],
)
def test_wrong_names_are_refused(settings, words):
    with pytest.raises(DataError, match=words):
        federation_from_table(patients(), **{"client": "hospital", "label": "diagnosis", **settings})


def test_a_global_test_is_read_by_the_same_schema():
    federation = table_federation(patients(), global_test=patients(12))
    assert ages(federation.global_test) == list(range(12))


class TestConfig:
    def write(self, tmp_path, text=""):
        patients().to_csv(tmp_path / "patients.csv", index=False)
        path = tmp_path / "config.toml"
        path.write_text(
            '[data]\nname = "table"\nfile = "patients.csv"\nclient = "hospital"\nlabel = "diagnosis"\n' + text
        )
        return path

    def test_a_file_is_named_relative_to_the_config_and_opt_out_knows_names_and_rules(self, tmp_path):
        text = 'ignore = ["consent"]\n[opt_out]\nclients = ["coast"]\nrules = [{field = "consent", values = ["no"]}]'
        config = read_config(self.write(tmp_path, text))
        federation = build_federation(config).federation
        assert federation.participants.tolist() == [0, 1]
        assert torch.equal(federation.load(0).train_opted_in, federation.load(0).train.x[:, 0] % 5 != 0)
        recorded = parse_config(config.model_dump(mode="json", exclude_none=True))
        assert build_federation(recorded).federation.digest == federation.digest

    def test_a_run_trains_and_stores_the_schema_and_the_names(self, tmp_path):
        config = read_config(
            self.write(tmp_path, "standardize = true\n[schedule]\nrounds = 2\nclients_per_round = 'all'")
        )
        result = fedmoe.run(config, directory=tmp_path / "run")
        assert result.data["class_names"] == ["cold", "flu"]
        stored = json.loads((tmp_path / "run" / "federation.json").read_text())
        assert TableSchema.from_dict(stored["table"]) == result.federation.table
        x = result.federation.table.encode(patients(4))
        assert result.personal_model("coast")(x).shape == (4, 2)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("lable = 3", "'data.lable' is not known"),
            ("[split]\nkind = 'majority'", "nothing to split"),
            ("[opt_out]\nclients = ['cost']", "Did you mean 'coast'"),
            ("[opt_out]\nclients = [3]", "numbered 0 to 2"),
            ("[opt_out]\nclient_fraction = 0.5", "clients and rules"),
        ],
    )
    def test_mistakes_are_refused(self, tmp_path, text, words):
        with pytest.raises((ConfigError, DataError), match=words):
            build_federation(read_config(self.write(tmp_path, text)))

    def test_its_keys_are_not_for_other_data_and_what_is_missing_is_named(self):
        with pytest.raises(ConfigError, match=r"data\.file is for data.name='table'"):
            parse_config({"data": {"name": "digits", "file": "a.csv"}})
        with pytest.raises(ConfigError, match=r"data\.client: field required"):
            parse_config({"data": {"name": "table", "file": "a.csv", "label": "y"}})
        with pytest.raises(ConfigError, match="these data have numbers"):
            build_federation(parse_config({"opt_out": {"clients": ["north"]}}))
