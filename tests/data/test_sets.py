"""What each set's rows mean: fields, cuts, and the numbers that its publisher states."""

import os

import numpy as np
import pytest
import torch
from stand_ins import stand_in, write_files

from fedmoe.data.loading import load_dataset
from fedmoe.data.registry import SOURCES

needs_files = pytest.mark.skipif("FEDMOE_DATA" not in os.environ, reason="FEDMOE_DATA is not set: nothing to read")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    def load(name):
        monkeypatch.setitem(SOURCES, name, stand_in(name))
        write_files(name, tmp_path)
        return load_dataset(name, tmp_path)

    return load


def words_of(dataset, row):
    return [dataset.lexicon[number] for number in row.tolist() if number]


class TestText:
    def test_ag_news_joins_title_and_description(self, tiny):
        news = tiny("ag_news")
        assert news.train.y.tolist() == [row % 4 for row in range(12)]
        assert words_of(news, news.train.x[3]) == ["title", "3", "it's", "news", "3", "of", "the", "day"]
        assert news.train.x.dtype == torch.int32 and news.prepare(news.train.x).dtype == torch.int64

    def test_the_header_that_names_the_group_is_not_in_a_post(self, tiny):
        posts = tiny("newsgroups")
        assert words_of(posts, posts.train.x[0]) == ["post", "0", "é"]
        assert "newsgroups" not in posts.lexicon
        assert posts.train.fields["group"].tolist() == posts.train.y.tolist() == list(range(12))

    def test_a_tenth_of_the_tweets_are_tested_and_none_is_lost(self, tiny):
        tweets = tiny("sent140")
        assert (len(tweets.train.y), len(tweets.test.y)) == (22, 2)
        users = torch.cat([tweets.train.fields["user"], tweets.test.fields["user"]])
        assert sorted(users.tolist()) == sorted(2 * list(range(12)))
        assert int(tweets.train.y.sum() + tweets.test.y.sum()) == 12

    def test_the_lexicon_is_sorted_with_padding_first(self, tiny):
        lexicon = tiny("ag_news").lexicon
        assert lexicon[0] == "" and list(lexicon) == sorted(lexicon)


class TestShakespeare:
    def test_windows_end_before_the_character_to_be_predicted(self, tiny):
        plays = tiny("shakespeare")
        alphabet = "".join(plays.class_names)
        text = "To be, or not." * 3 + "\nAy."
        rows = (plays.train.fields["role"] == 3).nonzero().flatten()
        for at, row in zip(range(1, len(text), 16), rows, strict=True):
            assert alphabet[plays.train.y[row]] == text[at]
            ids = [number for number in plays.train.x[row].tolist() if number]
            assert "".join(alphabet[number - 2] for number in ids) == text[:at][-80:]
            assert plays.train.x[row, -1] != 0

    def test_the_last_tenth_of_every_role_is_tested(self, tiny):
        plays = tiny("shakespeare")
        train, test = (table.fields["role"].bincount(minlength=12) for table in (plays.train, plays.test))
        assert test.tolist() == ((train + test) // 10).tolist() and int(test.sum()) > 0
        assert int(train.min()) > 0

    def test_the_vocabulary_is_the_public_alphabet(self, tiny):
        plays = tiny("shakespeare")
        assert (plays.vocabulary_size, plays.num_classes, len(set(plays.class_names))) == (82, 80, 80)


class TestSpam:
    def test_rows_are_shifted_ids_and_counts_most_frequent_first(self, tiny):
        mails = tiny("spam")
        assert (mails.train.x.shape, mails.train.x.dtype) == ((15 * 12, 2, 1024), torch.int32)
        assert mails.train.x[4, :, :4].tolist() == [[7, 2, 157128, 0], [5, 2, 1, 0]]
        assert mails.lexicon[7] == "6"
        assert mails.train.y[:3].tolist() == [0, 1, 0]
        assert mails.train.fields["inbox"].bincount().tolist() == [12] * 15
        assert len(mails.test.y) == 12


class TestWriters:
    def test_every_digit_has_a_writer(self, tiny):
        digits = tiny("mnist_by_writer")
        assert digits.train.fields["writer"].tolist() == [row // 3 for row in range(12)]
        assert digits.train.columns == digits.test.columns == ("label", "writer", "hsf")


class TestSyntheticRegression:
    def test_two_users_draw_points_of_the_function(self):
        data = load_dataset("synthetic_regression")
        assert (data.num_classes, data.input_shape) == (0, (2,))
        for table, rows in ((data.train, 3500), (data.test, 500)):
            assert table.fields["user"].bincount().tolist() == [rows, rows]
            assert (table.x.dtype, table.y.dtype) == (torch.float32, torch.float32)
            x, y = table.x.double().T
            torch.testing.assert_close(table.y.double(), 5 * x - 2 * y + 0.5 * y**3, rtol=1e-4, atol=1e-3)

    def test_a_linear_model_errs_about_as_much_as_printed(self):
        table = load_dataset("synthetic_regression").train
        for user, printed in ((0, 15.32), (1, 10.95)):
            rows = table.fields["user"] == user
            inputs = np.c_[table.x[rows].numpy(), np.ones(3500)]
            target = table.y[rows].numpy()
            fitted = inputs @ np.linalg.lstsq(inputs, target, rcond=None)[0]
            assert np.sqrt(np.mean((target - fitted) ** 2)) == pytest.approx(printed, rel=0.1)  # cubes of a sample vary

    def test_the_points_are_the_same_everywhere(self):
        assert load_dataset("synthetic_regression").train.x[0].tolist() == pytest.approx([-2.0332, 2.5163], abs=1e-4)


@needs_files
class TestPublished:
    def test_mnist_has_539_writers_and_shares_none_with_the_test_part(self):
        digits = load_dataset("mnist_by_writer")
        train, test = (set(table.fields["writer"].tolist()) for table in (digits.train, digits.test))
        assert (len(train), len(test), len(train & test)) == (539, 297, 0)

    def test_cifar100_has_500_images_of_each_class_and_five_classes_in_each_group(self):
        images = load_dataset("cifar100")
        assert images.train.y.bincount().tolist() == [500] * 100
        groups = {(int(c), int(f)) for c, f in zip(images.train.fields["coarse"], images.train.y, strict=True)}
        assert np.bincount([coarse for coarse, _ in groups]).tolist() == [5] * 20

    def test_each_inbox_has_200_of_400_spam(self):
        mails = load_dataset("spam")
        inbox = mails.train.fields["inbox"]
        assert inbox.bincount().tolist() == [400] * 15
        assert inbox[mails.train.y == 1].bincount().tolist() == [200] * 15
        assert mails.test.y.bincount().tolist() == [50, 50]

    def test_ag_news_is_balanced_where_it_is_tested(self):
        assert load_dataset("ag_news").test.y.bincount().tolist() == [1900] * 4

    def test_newsgroups_have_their_usual_counts(self):
        posts = load_dataset("newsgroups")
        assert posts.train.y.bincount().tolist()[:3] == [480, 584, 591]
        assert posts.test.y.bincount().tolist()[-3:] == [376, 310, 251]
