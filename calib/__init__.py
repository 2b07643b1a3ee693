"""Measuring a real system and fitting the cost model's parameters to it.

- `measurements`, `nccl`: samples, the CSV files that hold them, the output of nccl-tests.
- `campaign`: a calibration run from outside, local or inside a job; `measure` and `operations` are what its ranks do.
- `forms`, `robust`, `fit`, `device`: the formulas, robust non-negative least squares, the choice among formulas, intervals.
- `clusterfile`: from a fit to a cluster document; `pictures`: measured points and fitted lines.
- `trust`: how sure a plan is, given what the measurements leave open.
- `candidates`, `ranked`, `ranking`: strategies that are run on ranks (`replay`), predicted against measured.

`measure`, `operations` and `replay` run on OneFlow ranks; nothing is imported here, and the others work without OneFlow.
"""
