"""Tenants: who may call, how much each may take, and what keeps them apart.

file       the tenants file: rules by name                        (see docs/tenants.md)
watch      reads it again when it changes
registry   token |-> tenant; without a file, one tenant for all callers
gate       finds the tenant of a call before a message is read, or refuses the call
tenant     what a tenant may do now, and what it has done
account    what one generation uses
bucket     a rate with a burst
turns      who is next while the workers are busy
line       likewise for work before that, such as tokenizing
"""
