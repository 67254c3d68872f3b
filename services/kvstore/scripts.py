"""What runs inside Redis, so that a change is one step there.

Keys, all in the mesh's hash slot, all with a time to live; block keys are written in hexadecimal:
    block:<key>         hash: `w:<address>` -> "<epoch> <generation> <tier> <expiry>", `l:<lease id>` -> "<expiry>"
    holder:<address>    "<epoch> <generation>": which entries of that address count
    retired:<address>   set of earlier epochs, which may not publish any more
    lease:<lease id>    list of pinned keys
Times are milliseconds of the Redis server's clock. An entry counts while its epoch and generation are the holder's and its
expiry, or a lease on its key, lies ahead; so withdrawing all blocks of a process, or learning of its successor, is one write.
Changes are published as JSON: [kind, address, epoch, tier, keys], without `keys` for all of that process.
"""

from __future__ import annotations

# Common beginning: the holder's tag for ARGV[1] = epoch, ARGV[2] = address, made anew when another epoch held the address.
_ENTER = """
local holder, retired, channel = KEYS[1], KEYS[2], KEYS[3]
local epoch, address, ttl, retired_ttl = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if redis.call('SISMEMBER', retired, epoch) == 1 then return 'STALE' end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local tag = redis.call('GET', holder)
local held_by = tag and string.match(tag, '^(%S+) ')
if held_by ~= epoch then
  if held_by then
    redis.call('SADD', retired, held_by)
    redis.call('PEXPIRE', retired, retired_ttl)
    redis.call('PUBLISH', channel, cjson.encode({'WITHDRAWN', address, held_by, 0}))
  elseif ttl == 0 then
    return 'OK'
  end
  tag = epoch .. ' ' .. time[1] .. string.format('%06d', time[2])
end
redis.call('SET', holder, tag, 'PX', math.max(ttl, 1000, redis.call('PTTL', holder)))
"""
PUBLISH = (
    _ENTER
    + """
local start = tag .. ' ' .. ARGV[6] .. ' '
local value = start .. string.format('%.0f', now + ttl)
local new = {}
for i = 7, #ARGV do
  local block = ARGV[5] .. ARGV[i]
  local old = redis.call('HGET', block, 'w:' .. address)
  redis.call('HSET', block, 'w:' .. address, value)
  if redis.call('PTTL', block) < ttl then redis.call('PEXPIRE', block, ttl) end
  if not old or string.sub(old, 1, #start) ~= start then new[#new + 1] = ARGV[i] end
end
if #new > 0 then
  redis.call('PUBLISH', channel, cjson.encode({'PUBLISHED', address, epoch, tonumber(ARGV[6]), new}))
end
return 'OK'
"""
)
"""KEYS holder, retired, changes; ARGV epoch, address, ttl, how long epochs stay retired, prefix of block names, tier, keys."""

REPLACE = _ENTER + "return 'OK'"
"""As PUBLISH, up to how long epochs stay retired; ttl 0."""

WITHDRAW = """
local address, epoch = ARGV[2], ARGV[1]
local gone = {}
for i = 4, #ARGV do
  local block = ARGV[3] .. ARGV[i]
  local old = redis.call('HGET', block, 'w:' .. address)
  if old and string.sub(old, 1, #epoch + 1) == epoch .. ' ' then
    redis.call('HDEL', block, 'w:' .. address)
    gone[#gone + 1] = ARGV[i]
  end
end
if #gone > 0 then redis.call('PUBLISH', KEYS[1], cjson.encode({'WITHDRAWN', address, epoch, 0, gone})) end
return 'OK'
"""
"""KEYS changes; ARGV epoch, address, prefix of block names, keys."""

WITHDRAW_ALL = """
local tag = redis.call('GET', KEYS[1])
if not tag or string.match(tag, '^(%S+) ') ~= ARGV[1] then return 'OK' end
local time = redis.call('TIME')
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. time[1] .. string.format('%06d', time[2]), 'KEEPTTL')
redis.call('PUBLISH', KEYS[2], cjson.encode({'WITHDRAWN', ARGV[2], ARGV[1], 0}))
return 'OK'
"""
"""KEYS holder, changes; ARGV epoch, address."""

PIN = """
local ttl = tonumber(ARGV[2])
local time = redis.call('TIME')
local expiry = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ttl)
local count = 0
for i = 4, #ARGV do
  local block = ARGV[3] .. ARGV[i]
  if redis.call('EXISTS', block) == 0 then break end
  redis.call('HSET', block, 'l:' .. ARGV[1], expiry)
  if redis.call('PTTL', block) < ttl then redis.call('PEXPIRE', block, ttl) end
  redis.call('RPUSH', KEYS[1], ARGV[i])
  count = count + 1
end
if count > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
for i = 2, #KEYS do
  if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
end
return count
"""
"""KEYS lease, holders; ARGV lease id, ttl, prefix of block names, keys."""
