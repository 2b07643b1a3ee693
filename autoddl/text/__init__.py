"""What the commands print: plans, comparisons, explanations, verifications and fits as text.

- `tables`: `Text` (sections of lines and tables), `Table`, `Column`; the only place where widths are computed.
- `plans`: a plan, with a pipeline or without; `layers`: what all say of layers.
- `comparison`, `difference`, `explanation`, `graphs`, `trust`, `verification`: one module per result.
- `fits`, `rankings`: what calibration found; `pipelines`: the plans of the papers' planners; `runs`: schedules and trainings.

Every function returns a `Text`: ``str(text)`` has all columns, ``text.fitted(80)`` fits 80 columns.  A column of a table is one
`Column` in the module of its table.  Nothing that plans, prices or runs imports this package.
"""
