"""``python -m everystep.agent``: the entry that the trainer starts."""

from everystep.agent.serving import main

main()
