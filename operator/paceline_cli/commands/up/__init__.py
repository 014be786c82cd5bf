"""`paceline up`: the objects of some files, run by the unchanged operator as processes of this machine.

`command` is the whole run, `prerequisites`, `claim` and `objects` are what may refuse it before anything starts,
`runtime` composes store, API, operator, controllers and node, `view` says what is going on, `screen` shows it.
"""
