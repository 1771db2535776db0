"""Audits: does a model leak that somebody else has trained? `splitveil.audit` answers in one call; docs/audit.md shows how.

audit       the call: opens the model, takes the images, runs the attacks, measures
subject     what a door finds: an edge, perhaps a cloud, and what cannot be known about them
doors/      one file for each kind of thing that can be audited: a module, a function, pairs of tensors, exported models
images      images as people have them: data sets, loaders, arrays
channel     the defences between edge and cloud, from names or objects
report      what the call gives back
"""
