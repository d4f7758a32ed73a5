# SPDX-License-Identifier: Apache-2.0
"""The picture and the table of a run."""

import json

import pytest

from tools.plot_run import first_and_last, main, read_rows, smooth, summary


def write_log(path, losses):
    row = {"tokens": 100, "iteration_ms": 10.0, "tokens_per_second": 1e4, "mfu": 0.5, "device_peak_bytes": 2**20}
    rows = [{"iteration": index + 1, "lm_loss": loss, **row} for index, loss in enumerate(losses)]
    rows[-1] |= {"validation_loss": 1.25, "test_loss": 1.5}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 99, "lm')
    return path


def test_a_torn_line_is_left_out_and_means_are_right(tmp_path):
    rows = read_rows(write_log(tmp_path / "log.jsonl", [9, 7, 5, 4, 3, 2, 1]))
    assert len(rows) == 7
    assert first_and_last(rows) == (9, 3)
    assert smooth([1, 2, 3], window=2) == [1, 1.5, 2.5]
    table = dict(summary(rows))
    assert table["validation loss"] == "1.250" and table["test loss"] == "1.500" and table["training tokens"] == "700"


def test_steps_without_a_loss_are_left_out_and_other_files_refused(tmp_path, capsys):
    assert len(read_rows(write_log(tmp_path / "log.jsonl", [9, None, 5, 4]))) == 3
    for text in ('{"text": "abc"}', "[1]", "12", '{"iteration": "x"}'):
        (tmp_path / "other").write_text(text)
        assert main([str(tmp_path / "other")]) == 2
        assert "is not a log of --log-jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("fell_by, code", [("5.9", 0), ("6.1", 1)])
def test_the_picture_is_drawn_and_the_fall_is_checked(tmp_path, capsys, fell_by, code):
    log = write_log(tmp_path / "log.jsonl", [9, 7, 5, 4, 3, 2, 1])
    picture = tmp_path / "new" / "loss.png"
    assert main([str(log), "--output", str(picture), "--resumed", "3", "--fell-by", fell_by]) == code
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "6.000 lower" in capsys.readouterr().out


def test_an_empty_log_is_refused(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text("")
    assert main([str(tmp_path / "log.jsonl")]) == 2
    assert "holds no training step" in capsys.readouterr().err
