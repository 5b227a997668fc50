"""A run on a store: the only place that knows keys and the order of writes and deletes.

Theory of operation. A checkpoint exists while its manifest exists and no tombstone does. Everything a manifest refers to is durable
before it is created (data, parts, manifest), and it is gone before what it refers to is deleted (tombstone, manifest, data). Two races
remain, and both are settled by "write mine, then look at yours": a committer creates its manifest and then looks for a tombstone, a
sweeper creates the tombstone and then looks for the manifest, so at least one of them sees the other; likewise a reader creates its
hold and then reads the manifest, and ``forget`` creates the tombstone and then looks for holds. Names that may not exist yet are
looked for in listings, never by name: a network mount may remember for long that a name was not there.

Layout below the run (DESIGN section 4)::

    run.json                                format, run id
    attempts/<6 digits>.claim/              a claimed attempt (a folder: mkdir is exclusive on every mount)
    attempts/<6 digits>.json                its record; a claim without one counts as taken
    alive/<6 digits>.json                   until when the attempt says that it lives
    data/<key>/                             data files, and node-<5 digits>.json: the parts (numbered from 1)
    manifests/<key>.json                    the commits
    forgotten/<key>.json                    tombstones
    pins/<key>.json, verified/<key>.json
    holds/<key>/<until, ms>-<random>.json   the expiry is in the name, so that a listing suffices
    metrics/<key>.json                      all metrics of the checkpoint

Metrics for decisions are in ``metrics/`` alone: ``commit`` puts the manifest's own there before it creates the manifest, and
``record_metrics`` merges later ones into it. So retention never parses manifests, which may be large; the field in the manifest is
for whoever reads the manifest.
"""

from everystep.repository.records import Attempt, CheckpointKey, Skipped, Swept
from everystep.repository.run import Repository

__all__ = ["Attempt", "CheckpointKey", "Repository", "Skipped", "Swept"]
