"""`splitveil design`: given a device's budget, which edge should run there, cut where, with how much noise and CEM?

    budget     what the device can afford
    edges      every edge within it: models x cuts x channels of the bottleneck
    search     tries edges x noise x strength of CEM by short trainings and attacks, and trains the best of them in full
    front      what no other design beats, and which of these to take

docs/design.md is the user's page.
"""
