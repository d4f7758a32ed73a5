# SPDX-License-Identifier: Apache-2.0
"""Is the context used? A model's tasks beside its loss, by teacher forcing: one pass, no generation.

`words.py` writes phrases with any tokenizer, `samples.py` and `ruler.py` make samples of them, `plan.py` settles the
tasks of a run, `rows.py` packs samples, `score.py` scores them over the grid, `tasks.py` sums up, `report.py` and
`pictures.py` show it; `model.py` loads a model for nothing else.
"""
