"""The driver of a layer in TVMScript: tiles, then one parallel region in which threads take work items by ticket.

Items are numbered prepare < gate/up < down, and every wait of an item is for items with lower numbers. Tickets are given
out in order, and a thread holds the one after its item only to know what to prefetch; so the lowest unfinished item is
always being worked on: no barrier, and no deadlock with any number of threads, one included. Hot experts cost many items,
not one long one: work is balanced by cost.

All pointers are raw, all sizes 64-bit. `names.N` holds the GlobalVars by which the functions, these and the compiled TE
of `module`, call each other.
"""
