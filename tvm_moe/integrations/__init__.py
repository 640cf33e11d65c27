"""Our experts in other people's libraries; each is imported by name only, for none of them is a dependency."""
