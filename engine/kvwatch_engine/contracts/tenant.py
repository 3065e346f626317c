"""What keeps tenants apart in the prefix cache. Knows neither keys nor files."""


def tenant_salt(tenant: str, salt: str | None = None) -> str:
    """Return the salt of a tenant's blocks.

    Args:
        tenant: its name; empty for requests of no tenant, which have no salt.
        salt: what the operator chose. Tenants of equal salt share blocks, and those whose salt is empty share with
            requests of no tenant. None: the tenant shares with nobody. A name never equals another tenant's salt.
    """
    if salt is None:
        return f"tenant:{tenant}" if tenant else ""
    return f"salt:{salt}" if salt else ""
