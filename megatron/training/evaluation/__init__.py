# SPDX-License-Identifier: Apache-2.0
"""Evaluates whether a model uses its context, by tasks with teacher forcing: one pass and no generation.

haystack.py writes phrases with any tokenizer, samples.py makes samples from the phrases and packs samples into rows,
eval_plan.py selects the samples of a run, tasks.py scores the samples over the grid, eval_report.py shows the results,
evaluated_model.py loads a model that is only evaluated, and reference_model.py makes that of --dpo.
"""
