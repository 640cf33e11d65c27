"""The benchmark: our layers and those of peers in turn, beside what the machine can do at most.

`run` is the whole; a side (`peers`) lives in a process of its own (`worker`, driven by `remote`), all draw the same
weights (`layers`) and routing (`routing`), `timing` lets them take turns, `checks` compares their outputs, `probes` and
`roofline` tell the limit, `report` and `plot` show it. `packing` and `overheads` measure what is not a layer's call,
`beside` one between matmuls of torch; `simulate` plays the driver's schedule (`work`, `costs`) on any number of threads;
`tables` shows these.
"""
