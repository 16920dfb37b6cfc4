"""Tenants: who may call, how much each may take, and what keeps them apart.

file       the tenants file: rules by name                        (see docs/tenants.md)
watch      reads it again when it changes
registry   token |-> tenant; one tenant that everybody is, where there is no file
gate       finds out whose call it is before a message is read, or refuses it
tenant     what one may do now, and what it has done
account    what one generation uses
bucket     a rate with a burst
turns      who is next while the workers are busy
"""
