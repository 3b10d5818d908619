"""Who holds which tokens, and what each tile visits.

In: document lengths, masks, a rank and a world size. Out: numpy tables of spans, tiles, moves.
Imports nothing else of ringfa3.
"""
