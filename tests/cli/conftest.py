from support.stores import migrated_database, no_ambient_store, store

__all__ = ["migrated_database", "no_ambient_store", "store"]
