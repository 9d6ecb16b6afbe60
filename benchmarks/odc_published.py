"""The bubble rates that ODC's paper reports (Tables 4 and 6), and the setting of its parametric study (Table 1)."""

from __future__ import annotations

from typing import Any

TABLES = """
1.5B  8 longalign collective_lb_micro   66.81 52.63 35.28 22.08
1.5B  8 longalign collective_local_sort 66.81 61.26 52.22 42.82
1.5B  8 longalign odc_lb_micro          66.81 52.48 26.31  1.73
1.5B  8 longalign odc_lb_mini           66.81 48.58 14.81  0.02
1.5B  8 longalign odc_local_sort        66.81 58.43 48.29 39.70
1.5B  8 swe_smith collective_lb_micro   52.36 36.28 20.00 10.74
1.5B  8 swe_smith collective_local_sort 52.36 48.22 37.74 33.28
1.5B  8 swe_smith odc_lb_micro          52.36 25.96  1.99  0.06
1.5B  8 swe_smith odc_lb_mini           52.36 20.66  0.71  0.05
1.5B  8 swe_smith odc_local_sort        52.36 46.27 32.40 29.18
7B    8 longalign collective_lb_micro   63.85 48.31 30.31 17.77
7B    8 longalign collective_local_sort 63.85 58.03 48.95 39.65
7B    8 longalign odc_lb_micro          63.85 48.14 21.23  0.39
7B    8 longalign odc_lb_mini           63.85 42.71  7.19  0.03
7B    8 longalign odc_local_sort        63.85 54.99 45.11 36.71
7B    8 swe_smith collective_lb_micro   49.70 33.87 17.41  9.77
7B    8 swe_smith collective_local_sort 49.70 45.69 35.53 31.18
7B    8 swe_smith odc_lb_micro          49.70 22.86  1.29  0.08
7B    8 swe_smith odc_lb_mini           49.70 16.81  0.59  0.05
7B    8 swe_smith odc_local_sort        49.70 43.75 30.21 27.08
14B  16 longalign collective_lb_micro   72.28 57.52 37.75 24.41
14B  16 longalign collective_local_sort 72.28 66.02 59.19 48.97
14B  16 longalign odc_lb_micro          72.28 56.78 29.52  0.02
14B  16 longalign odc_lb_mini           72.28 53.48 14.43  0.02
14B  16 longalign odc_local_sort        72.28 64.20 52.93 42.46
14B  16 swe_smith collective_lb_micro   56.53 35.00 18.45  9.30
14B  16 swe_smith collective_local_sort 56.53 47.47 42.04 35.51
14B  16 swe_smith odc_lb_micro          56.53 24.87  0.47  0.05
14B  16 swe_smith odc_lb_mini           56.53 16.13  0.42  0.04
14B  16 swe_smith odc_local_sort        56.53 45.88 39.27 32.04
32B  32 longalign collective_lb_micro   73.01 55.19 35.59 20.43
32B  32 longalign collective_local_sort 73.01 67.49 57.00 50.50
32B  32 longalign odc_lb_micro          73.01 54.64 26.06  0.01
32B  32 longalign odc_lb_mini           73.01 50.91 10.67  0.01
32B  32 longalign odc_local_sort        73.01 64.16 49.55 37.76
32B  32 swe_smith collective_lb_micro   54.03 32.54 16.69  8.95
32B  32 swe_smith collective_local_sort 54.03 50.42 44.74 36.49
32B  32 swe_smith odc_lb_micro          54.03 20.66  0.29  0.03
32B  32 swe_smith odc_lb_mini           54.03 10.11  0.30  0.03
32B  32 swe_smith odc_local_sort        54.03 49.25 40.55 32.16
1.5B  8 aime collective_lb_micro        15.73  6.56  3.47  1.65
1.5B  8 aime collective_native          33.83 27.61 20.81 13.13
1.5B  8 aime odc_lb_micro               10.26  0.51  0.05  0.01
1.5B  8 aime odc_lb_mini                10.26  0.51  0.05  0.01
7B    8 aime collective_lb_micro        20.79  7.48  3.93  1.90
7B    8 aime collective_native          40.15 32.41 23.40 13.45
7B    8 aime odc_lb_micro               16.85  0.53  0.06  0.01
7B    8 aime odc_lb_mini                16.85  0.53  0.06  0.01
14B  16 aime collective_lb_micro        28.35 10.77  5.91  2.48
14B  16 aime collective_native          46.68 36.36 26.63 14.83
14B  16 aime odc_lb_micro               22.89  0.61  0.04  0.01
14B  16 aime odc_lb_mini                22.89  0.61  0.04  0.01
"""  # Table 6, then Table 4: percent of all devices' time
MINIBATCHES = {"longalign": (1, 2, 4, 8), "swe_smith": (1, 2, 4, 8), "aime": (2, 4, 8, 16)}  # samples a device
GOLDEN = {"minibatch": 4, "max_length": 65536, "packing_ratio": 1, "devices": 8}  # Table 1: LongAlign, 1.5B
GOLDEN_MEASURED = 401.3 / 299.4  # Table 5, samples a second: ODC LB-Mini over collective LB-Micro


def published() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns `{(data, model): {"devices": int, "rates": {method: [percent, one a minibatch size]}}}`."""
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for line in TABLES.strip().splitlines():
        model, devices, data, method, *rates = line.split()
        row = out.setdefault((data, model), {"devices": int(devices), "rates": {}})
        row["rates"][method] = [float(rate) for rate in rates]
    return out
