-- Reads the heartbeats of all gateways or workers and removes expired ids from their set.
-- KEYS: the set of ids.
-- ARGV: key prefix of the heartbeats.
-- Returns the values ('' for one that is not a string) and the removed ids.
local values, lost = {}, {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.pcall('GET', ARGV[1] .. id)
  if type(value) == 'table' then value = '' end
  if value then values[#values + 1] = value
  else
    redis.call('SREM', KEYS[1], id)
    lost[#lost + 1] = id
  end
end
return {values, lost}
