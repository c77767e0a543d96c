{{/* The port of an http URL; empty for anything else. */}}
{{- define "medusa-gateway.urlPort" -}}
{{- if and (kindIs "string" .) (regexMatch "^https?://[^/\\s]" .) }}
{{- $host := regexReplaceAll "^https?://([^/?#]*@)?([^/?#]*)(.|\\n)*$" . "${2}" }}
{{- default (ternary "443" "80" (hasPrefix "https:" .)) (regexFind ":[0-9]+$" $host | trimPrefix ":") }}
{{- end }}
{{- end }}

{{/* Ports of all that the values name beside Redis, sorted, with commas between: the trace collector, upstreams, receivers of alerts,
and what extraEnv holds as plain URLs (webhooks by url_env, proxies, a mirror of the hub). */}}
{{- define "medusa-gateway.endpointPorts" -}}
{{- $urls := list .Values.telemetry.otlpEndpoint -}}
{{- range .Values.extraEnv }}{{ $urls = append $urls (get . "value") }}{{ end -}}
{{- $backends := get (fromYaml .Values.backends.content) "backends" -}}
{{- if kindIs "slice" $backends }}
{{- range $backends }}{{ if kindIs "map" . }}{{ $urls = append $urls (get . "url") }}{{ end }}{{ end -}}
{{- end -}}
{{- $receivers := get (fromYaml .Values.policy.content) "receivers" -}}
{{- if kindIs "map" $receivers }}
{{- range $receivers }}{{ if kindIs "map" . }}{{ $urls = append $urls (get . "url") }}{{ end }}{{ end -}}
{{- end -}}
{{- $ports := list -}}
{{- if include "medusa-gateway.usesHub" . }}{{ $ports = append $ports "443" }}{{ end -}}
{{- /* gRPC takes 443 where an address has no port, whatever its scheme. */}}
{{- if and (eq .Values.telemetry.otlpProtocol "grpc") (regexMatch "^http://[^:/]+/?$" .Values.telemetry.otlpEndpoint) }}{{ $ports = append $ports "443" }}{{ end -}}
{{- range $urls }}{{ $ports = append $ports (include "medusa-gateway.urlPort" .) }}{{ end -}}
{{- $ports | compact | uniq | sortAlpha | join "," }}
{{- end }}

{{/* Ports of an external Redis, with commas between. */}}
{{- define "medusa-gateway.redisPorts" -}}
{{- if eq .Values.redis.mode "external" }}
{{- $redis := .Values.redis.external -}}
{{- $ports := list "6379" -}}
{{- if or (eq $redis.kind "sentinel") $redis.urlSecret.name }}{{ $ports = append $ports "26379" }}{{ end -}}
{{- range $redis.hosts }}{{ $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default "6379") }}{{ end -}}
{{- $ports | uniq | sortAlpha | join "," }}
{{- end }}
{{- end }}
