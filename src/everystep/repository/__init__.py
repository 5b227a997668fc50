"""A run on a store: the only place that knows keys and the order of writes and deletes.

Theory of operation. A checkpoint exists while its manifest exists and no tombstone does. Everything a manifest refers to is durable
before it is created (data, parts, manifest), and it is gone before what it refers to is deleted (tombstone, manifest, data). Three races
remain. Whether an uncommitted checkpoint is committed or given up, by whichever nodes, is decided by the one name of its manifest
(``fates.py``). The others are settled by "write mine, then look at yours": a committer creates its manifest and then looks for a tombstone,
``forget`` creates the tombstone and then deletes the manifest, so the committer sees it or the manifest goes; likewise a reader creates its
hold and then reads the manifest, and ``forget`` creates the tombstone and then looks for holds. A committer that loses leaves its manifest
where it is: the tombstone makes it count for nothing, and the sweep deletes it.

Several nodes. On a store that all nodes see, their parts meet in the checkpoint's folder, and any node commits, in any order: equal parts
make equal bytes. Data that is not committed is deleted only when it is given up or its attempt is over; what the newest attempt has not
committed, another node may be writing. Where each node has a store of its own, a store holds its node's data and part, and every store the
same manifest; data whose part is durable may be committed elsewhere, and stays until a newer one is committed here.

A network mount may remember for long that a name was not there, and may list what was there a moment ago: what decides over deleting or
committing is looked for in a listing and by its name, or is decided by a creation, which only the server answers.

A checkpoint can be *reduced*: what is left of it is committed under a key of its own, and refers to data in the folder of the whole one,
which is forgotten then (``reducing.py``). So data is deleted by what manifests refer to, never by the folder that it is in.

Layout below the run (DESIGN section 4)::

    run.json                                format, run id
    attempts/<6 digits>.claim/              a claimed attempt (a folder: mkdir is exclusive on every mount)
    attempts/<6 digits>.json                its record; a claim without one counts as taken
    alive/<6 digits>.json                   until when the attempt says that it lives
    data/<key>/                             data files, and node-<5 digits>.json: the parts (numbered from 1)
    manifests/<key>.json                    the commits; or the mark that there will be none, beside a tombstone
    manifests/<key>-r<n>.json               the commits of reduced ones, with records of their own, but no folder in data/
    forgotten/<key>.json                    tombstones, with the reason of those given up
    pins/<key>.json, verified/<key>.json
    holds/<key>/<until, ms>-<random>.json   the expiry is in the name, so that a listing suffices
    metrics/<key>.json                      all metrics of the checkpoint
    stats/<6 digits>[-n<5 digits>].json     the agents' counters by attempt and, from the second node on, node

Metrics for decisions are in ``metrics/`` alone: ``commit`` puts the manifest's own there before it creates the manifest, and
``record_metrics`` merges later ones into it. So retention never parses manifests, which may be large; the field in the manifest is
for whoever reads the manifest.
"""

from everystep.repository.records import Attempt, CheckpointKey, Skipped, Swept, lineage_limits, within
from everystep.repository.reducing import MayDrop, groups_of_kind
from everystep.repository.run import Repository

__all__ = ["Attempt", "CheckpointKey", "MayDrop", "Repository", "Skipped", "Swept", "groups_of_kind", "lineage_limits", "within"]
