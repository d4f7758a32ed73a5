# SPDX-License-Identifier: Apache-2.0
"""Whether a model uses its context: tasks by teacher forcing, one pass and no generation.

haystack.py writes phrases with any tokenizer, samples.py makes samples of them and packs them, eval_plan.py settles the
tasks of a run, tasks.py scores them over the grid, eval_report.py shows the results, and evaluated_model.py loads a
model that is only evaluated.
"""
